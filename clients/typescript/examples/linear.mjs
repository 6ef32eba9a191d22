// A small model that Node and browsers train alike: y = w · x + b by gradient descent, on data that never leaves them.

/** Return rows [x1, x2, y] of a client, the same for the same number. */
export function makeRows(number, count = 64) {
  const rows = [];
  for (let index = 0; index < count; index++) {
    const x1 = ((index * 7 + number * 3) % 16) / 16;
    const x2 = ((index * 5 + number * 11) % 16) / 16;
    rows.push([x1, x2, 2 * x1 - x2 + 0.5 + 0.01 * number]);
  }
  return rows;
}

/** Return a trainer of the tensors `weight` (two numbers) and `bias` (one) on these rows. */
export function makeTrainer(rows) {
  return async (task) => {
    const weight = task.model.get("weight").values;
    const bias = task.model.get("bias").values;
    const { epochs = 5, learning_rate: rate = 0.1 } = task.config;
    let loss = 0;
    for (let epoch = 0; epoch < epochs; epoch++) {
      const gradient = [0, 0, 0];
      loss = 0;
      for (const [x1, x2, y] of rows) {
        const error = weight[0] * x1 + weight[1] * x2 + bias[0] - y;
        gradient[0] += error * x1;
        gradient[1] += error * x2;
        gradient[2] += error;
        loss += error * error;
      }
      weight[0] -= (rate * gradient[0]) / rows.length;
      weight[1] -= (rate * gradient[1]) / rows.length;
      bias[0] -= (rate * gradient[2]) / rows.length;
      await task.progress((epoch + 1) / epochs);
    }
    return { numExamples: rows.length, metrics: { loss: loss / rows.length } };
  };
}
