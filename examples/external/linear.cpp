// A trainer in C++ without any library: linear regression by gradient descent, on a task folder of fedplat.
//
//     g++ -O2 -std=c++17 -o linear linear.cpp
//     fedplat-client run --trainer "linear=exec:./linear /path/to/data.csv"
//
// Each line of data.csv has the inputs and, last, the target. The model has the tensors weight [inputs] and bias [],
// float32. docs/task-folder.md describes the files.
#include <atomic>
#include <cctype>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// JSON, as far as task.json and the header of a safetensors file need it.
struct Json {
  std::map<std::string, Json> members;
  std::vector<Json> items;
  std::string text;
  double number = 0;

  const Json& operator[](const std::string& name) const {
    auto found = members.find(name);
    if (found == members.end()) throw std::runtime_error("there is no " + name);
    return found->second;
  }
};

struct Parser {
  const std::string& text;
  size_t at = 0;

  char next() {
    while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) at++;
    if (at >= text.size()) throw std::runtime_error("the JSON ends too early");
    return text[at];
  }
  void expect(char wanted) {
    if (next() != wanted) throw std::runtime_error(std::string("expected ") + wanted + " in the JSON");
    at++;
  }
  std::string string() {
    std::string value;
    expect('"');
    for (; at < text.size() && text[at] != '"'; at++) {
      if (text[at] == '\\') at++;  // names of tensors and keys that this program reads have no other escapes
      value += text.at(at);
    }
    expect('"');
    return value;
  }
  Json value() {
    Json found;
    char first = next();
    if (first == '{' || first == '[') {
      char last = first == '{' ? '}' : ']';
      at++;
      for (bool more = next() != last; more; more = next() == ',' && ++at) {
        if (first == '[') {
          found.items.push_back(value());
          continue;
        }
        std::string name = string();
        expect(':');
        found.members[name] = value();
      }
      expect(last);
    } else if (first == '"') {
      found.text = string();
    } else {  // a number, true, false or null
      size_t begin = at;
      while (at < text.size() && !std::strchr(",]} \n\r\t", text[at])) at++;
      found.text = text.substr(begin, at - begin);
      found.number = std::strtod(found.text.c_str(), nullptr);
    }
    return found;
  }
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// A reader sees the old file or the whole new one.
void write(const std::string& path, const std::string& content) {
  std::ofstream file(path + ".new", std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file || std::rename((path + ".new").c_str(), path.c_str()) != 0)
    throw std::runtime_error(path + " cannot be written");
}

// A safetensors file: 8 bytes (the length of the header, little-endian), the header, and the values.
struct Model {
  std::string content;
  Json header;
  size_t body;

  explicit Model(const std::string& path) : content(read(path)) {
    uint64_t size = 0;
    for (int i = 0; i < 8; i++) size |= static_cast<uint64_t>(static_cast<unsigned char>(content.at(i))) << (8 * i);
    std::string text = content.substr(8, size);
    header = Parser{text}.value();
    body = 8 + size;
  }
  std::vector<double> get(const std::string& name) const {
    const Json& offsets = header[name]["data_offsets"];
    if (header[name]["dtype"].text != "F32") throw std::runtime_error(name + " is not F32");
    std::vector<double> values;
    for (size_t at = offsets.items.at(0).number; at < offsets.items.at(1).number; at += 4) {
      float value;
      std::memcpy(&value, content.data() + body + at, 4);
      values.push_back(value);
    }
    return values;
  }
  void set(const std::string& name, const std::vector<double>& values) {
    size_t at = body + static_cast<size_t>(header[name]["data_offsets"].items.at(0).number);
    for (double each : values) {
      float value = static_cast<float>(each);
      std::memcpy(&content[at], &value, 4);
      at += 4;
    }
  }
};

std::vector<std::vector<double>> read_table(const std::string& path) {
  std::istringstream lines(read(path));
  std::vector<std::vector<double>> rows;
  for (std::string line, cell; std::getline(lines, line);) {
    std::istringstream cells(line);
    rows.emplace_back();
    while (std::getline(cells, cell, ',')) rows.back().push_back(std::stod(cell));
  }
  if (rows.empty()) throw std::runtime_error(path + " has no rows");
  return rows;
}

std::atomic<bool> stopped{false};

int main(int count, char** arguments) try {
  std::signal(SIGTERM, [](int) { stopped = true; });
  if (count != 2) throw std::runtime_error("expected the path of the data");
  std::string text = read("task.json");
  Json task = Parser{text}.value();
  auto rows = read_table(arguments[1]);
  Model model("model.safetensors");
  auto weight = model.get("weight");
  double bias = model.get("bias").at(0), loss = 0;
  int epochs = static_cast<int>(task["config"]["epochs"].number);
  double rate = task["config"]["learning_rate"].number;
  bool trains = task["task"].text == "train";
  for (int epoch = 0; epoch < (trains ? epochs : 1); epoch++) {
    if (stopped || std::ifstream("stop")) throw std::runtime_error("stopped");
    std::vector<double> gradient(weight.size() + 1, 0.0);
    loss = 0;
    for (const auto& row : rows) {
      if (row.size() != weight.size() + 1) throw std::runtime_error("a row has another number of inputs than the model");
      double error = bias - row.back();
      for (size_t i = 0; i < weight.size(); i++) error += weight[i] * row[i];
      for (size_t i = 0; i < weight.size(); i++) gradient[i] += error * row[i];
      gradient.back() += error;
      loss += error * error / rows.size();
    }
    if (!trains) break;
    for (size_t i = 0; i < weight.size(); i++) weight[i] -= rate * 2 / rows.size() * gradient[i];
    bias -= rate * 2 / rows.size() * gradient.back();
    write("progress", std::to_string((epoch + 1.0) / epochs));
  }
  if (trains) {
    model.set("weight", weight);
    model.set("bias", {bias});
    write("model-out.safetensors", model.content);
  }
  std::ostringstream result;
  result.precision(17);
  result << "{\"num_examples\": " << rows.size() << ", \"metrics\": {\"loss\": " << loss << "}}";
  write("result.json", result.str());
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";  // to the log, which stays with the owner of the client
  return 1;
}
