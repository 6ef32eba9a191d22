# A trainer in R without any package: linear regression by gradient descent, on a task folder of fedplat.
#
#     fedplat-client run --trainer "linear=exec:Rscript /path/to/linear.R /path/to/data.csv"
#
# Each line of data.csv has the inputs and, last, the target. The model has the tensors weight [inputs] and bias [],
# float32. docs/task-folder.md describes the files.

read_text <- function(path) readChar(path, file.info(path)$size, useBytes = TRUE)

# A reader sees the old file or the whole new one.
replace_file <- function(path, write) {
  write(paste0(path, ".new"))
  invisible(file.rename(paste0(path, ".new"), path))
}

number_of <- function(text, name) { # in the JSON of task.json
  found <- regmatches(text, regexec(sprintf('"%s"\\s*:\\s*([-+0-9.eE]+)', name), text))[[1]]
  if (length(found) != 2) stop(sprintf("the task has no number %s", name))
  as.numeric(found[2])
}

# A safetensors file: 8 bytes (the length of the header, little-endian), the header, and the values.
read_model <- function(path) {
  content <- readBin(path, "raw", file.info(path)$size)
  size <- sum(as.integer(content[1:8]) * 256^(0:7))
  list(content = content, header = rawToChar(content[9:(8 + size)]), body = 8 + size)
}

place_of <- function(model, name) {
  pattern <- sprintf('"%s"\\s*:\\s*\\{[^}]*"data_offsets"\\s*:\\s*\\[\\s*([0-9]+)\\s*,\\s*([0-9]+)', name)
  found <- regmatches(model$header, regexec(pattern, model$header))[[1]]
  if (length(found) != 3) stop(sprintf("the model has no %s", name))
  offsets <- as.numeric(found[2:3])
  (model$body + offsets[1] + 1):(model$body + offsets[2])
}

get_tensor <- function(model, name) {
  bytes <- model$content[place_of(model, name)]
  readBin(bytes, "numeric", length(bytes) / 4, size = 4, endian = "little")
}

set_tensor <- function(model, name, values) {
  model$content[place_of(model, name)] <- writeBin(as.numeric(values), raw(), size = 4, endian = "little")
  model
}

task <- read_text("task.json")
trains <- grepl('"task"\\s*:\\s*"train"', task)
data <- as.matrix(read.csv(commandArgs(trailingOnly = TRUE)[1], header = FALSE))
inputs <- data[, -ncol(data), drop = FALSE]
target <- data[, ncol(data)]
model <- read_model("model.safetensors")
weight <- get_tensor(model, "weight")
bias <- get_tensor(model, "bias")
if (length(weight) != ncol(inputs)) stop("the data have another number of inputs than the model")

loss <- 0
epochs <- if (trains) number_of(task, "epochs") else 1
rate <- if (trains) number_of(task, "learning_rate") else 0
for (epoch in seq_len(epochs)) {
  if (file.exists("stop")) quit(status = 1)
  error <- as.vector(inputs %*% weight) + bias - target
  loss <- mean(error^2)
  weight <- weight - rate * 2 / length(target) * as.vector(crossprod(inputs, error))
  bias <- bias - rate * 2 / length(target) * sum(error)
  replace_file("progress", function(path) cat(epoch / epochs, file = path))
}
if (trains) {
  model <- set_tensor(set_tensor(model, "weight", weight), "bias", bias)
  replace_file("model-out.safetensors", function(path) writeBin(model$content, path))
}
result <- sprintf('{"num_examples": %d, "metrics": {"loss": %.17g}}', length(target), loss)
replace_file("result.json", function(path) cat(result, file = path))
