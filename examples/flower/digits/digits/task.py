"""The model, its data and its training: plain PyTorch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A network with one hidden layer for pictures of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return a score for each digit."""
        return self.output(torch.relu(self.hidden(pictures)))


def load_pictures() -> TensorDataset:
    """Return all pictures, with pixels from 0 to 1, and their digits."""
    pictures, digits = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pictures / 16.0, dtype=torch.float32), torch.tensor(digits))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return the training and the test data of one partition."""
    data = load_pictures()
    rows = torch.arange(partition_id, len(data), num_partitions)
    test, train = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    order = torch.Generator().manual_seed(partition_id)
    return (
        DataLoader(TensorDataset(*data[train]), batch_size=batch_size, shuffle=True, generator=order),
        DataLoader(TensorDataset(*data[test]), batch_size=batch_size),
    )


def train(net: Net, data: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train the network, and return its mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for pictures, digits in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pictures), digits)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net: Net, data: DataLoader) -> tuple[float, float]:
    """Return the mean loss and the accuracy of the network."""
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for pictures, digits in data:
            outputs = net(pictures)
            loss += nn.functional.cross_entropy(outputs, digits, reduction="sum").item()
            correct += int((outputs.argmax(1) == digits).sum())
            count += len(digits)
    return loss / count, correct / count
