// Runs a package that amp_fx.package has made, without Python:
//
//   run_package model.pt2 ROWS COLUMNS
//
// gives it a matrix of that size with numbers from -1 to 1, and prints what comes out.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package model.pt2 ROWS COLUMNS\n";
    return 2;
  }
  const int64_t rows = std::atoll(argv[2]), columns = std::atoll(argv[3]);
  c10::InferenceMode inference;

  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  std::vector<at::Tensor> inputs = {
      at::linspace(-1, 1, rows * columns).reshape({rows, columns})};
  std::vector<at::Tensor> outputs = model.run(inputs);

  const auto numbers = outputs.at(0).to(at::kDouble).contiguous();
  std::cout << std::setprecision(17);
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    std::cout << numbers.data_ptr<double>()[i] << "\n";
  }
}
