// Batch-invariant products, softmax and sums: each row of a result depends on its own inputs only.
//
// Every element is accumulated along the summed dimension from the first element to the last.
// Adding zeros changes nothing, so masked keys at any position do not change a sum. One loop with a
// fixed, zero-padded width computes all elements. Therefore no element depends on the number of
// rows, columns or threads, or on its position in the tensor.
//
// Relies on at::parallel_for, and on GCC's vector extensions and function versions.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#include <Python.h>

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kLanes = 16, kVectors = 4, kColumns = kLanes * kVectors, kRows = 4, kChunk = 64;
typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));

// A strided matrix of dtype float, bfloat16 or half.
struct Matrix {
  const void* data;
  at::ScalarType dtype;
  int64_t row, column;
};

Matrix matrix(const at::Tensor& x) {
  return {x.const_data_ptr(), x.scalar_type(), x.stride(-2), x.stride(-1)};
}

template <typename T>
INLINE void load_as(float* out, Matrix m, int64_t offset, int64_t rows, int64_t columns, int64_t width) {
  const T* in = static_cast<const T*>(m.data) + offset;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      out[i * width + j] = static_cast<float>(in[i * m.row + j * m.column]);
    }
  }
}

// Converts a block of a matrix to float. Rows of `out` have `width` elements; the elements of `out`
// outside of the block are not changed.
FOR_EACH_CPU void load(float* out, Matrix m, int64_t offset, int64_t rows, int64_t columns, int64_t width) {
  if (m.dtype == at::kBFloat16) {
    load_as<c10::BFloat16>(out, m, offset, rows, columns, width);
  } else if (m.dtype == at::kHalf) {
    load_as<c10::Half>(out, m, offset, rows, columns, width);
  } else {
    load_as<float>(out, m, offset, rows, columns, width);
  }
}

void store(const float* in, const at::Tensor& out, int64_t offset, int64_t size) {
  if (out.scalar_type() == at::kBFloat16) {
    std::copy(in, in + size, static_cast<c10::BFloat16*>(out.data_ptr()) + offset);
  } else if (out.scalar_type() == at::kHalf) {
    std::copy(in, in + size, static_cast<c10::Half*>(out.data_ptr()) + offset);
  } else {
    std::copy(in, in + size, static_cast<float*>(out.data_ptr()) + offset);
  }
}

// out[kRows][kColumns] = left[kRows][depth] @ right[depth][kColumns]
FOR_EACH_CPU void multiply(const float* left, const float* right, int64_t depth, float* out) {
  Vector sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector* row = reinterpret_cast<const Vector*>(right + k * kColumns);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] += left[i * depth + k] * row[j];
      }
    }
  }
  std::memcpy(out, sums, sizeof(sums));
}

FOR_EACH_CPU void combine(float* sums, const float* bias, float alpha, float beta) {
  for (int j = 0; j < kColumns; ++j) {
    sums[j] = alpha * sums[j] + beta * bias[j];
  }
}

// alpha * (left @ right) + beta * bias, for two matrices or two batches of matrices. Does not read
// the bias if beta is 0, so that it may be NaN, as in torch.
at::Tensor product(const at::Tensor& first, const at::Tensor& second, const std::optional<at::Tensor>& bias,
                   double beta, double alpha) {
  const at::Tensor left = first.dim() == 2 ? first.unsqueeze(0) : first;
  const at::Tensor right = second.dim() == 2 ? second.unsqueeze(0) : second;
  const int64_t batch = left.size(0), rows = left.size(1), depth = left.size(2), columns = right.size(2);
  const at::Tensor out = at::empty({batch, rows, columns}, left.options());
  const at::Tensor added = bias.has_value() ? bias->expand({batch, rows, columns}) : out;
  const Matrix a = matrix(left), b = matrix(right), c = matrix(added);
  const bool adds = bias.has_value() && beta != 0;
  const int64_t num_panels = (columns + kColumns - 1) / kColumns, num_chunks = (rows + kChunk - 1) / kChunk;
  at::parallel_for(0, batch * num_panels * num_chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> panel, chunk;
    float tile[kRows * kColumns], line[kColumns] = {};
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / (num_panels * num_chunks);
      const int64_t j = task / num_chunks % num_panels * kColumns, i = task % num_chunks * kChunk;
      const int64_t width = std::min<int64_t>(kColumns, columns - j), height = std::min<int64_t>(kChunk, rows - i);
      panel.assign(depth * kColumns, 0.0f);
      chunk.assign((height + kRows - 1) / kRows * kRows * depth, 0.0f);
      load(panel.data(), b, n * right.stride(0) + j * b.column, depth, width, kColumns);
      load(chunk.data(), a, n * left.stride(0) + i * a.row, height, depth, depth);
      for (int64_t r = 0; r < height; ++r) {
        float* sums = tile + r % kRows * kColumns;
        if (r % kRows == 0) {
          multiply(chunk.data() + r * depth, panel.data(), depth, tile);
        }
        if (adds) {
          load(line, c, n * added.stride(0) + (i + r) * c.row + j * c.column, 1, width, kColumns);
        }
        if (adds || alpha != 1) {
          combine(sums, line, static_cast<float>(alpha), static_cast<float>(beta));
        }
        store(sums, out, (n * rows + i + r) * columns + j, width);
      }
    }
  });
  return first.dim() == 2 ? out.squeeze(0) : out;
}

// Products of groups of rows, each with its matrix. Group i ends before row ends[i].
at::Tensor grouped_product(const at::Tensor& rows, const at::Tensor& matrices, const at::Tensor& ends) {
  at::Tensor out = at::zeros({rows.size(0), matrices.size(2)}, rows.options());
  const at::Tensor limits = ends.to(at::kLong);
  int64_t begin = 0;
  for (int64_t i = 0; i < matrices.size(0); ++i) {
    const int64_t end = limits.const_data_ptr<int64_t>()[i];
    out.slice(0, begin, end).copy_(product(rows.slice(0, begin, end), matrices.select(0, i), {}, 0.0, 1.0));
    begin = end;
  }
  return out;
}

// exp(x) for x <= 0, as in the Cephes library; 0 if the result would be subnormal.
INLINE Vector exponential(Vector x) {
  const Vector clamped = x < -87.3f ? Vector{} - 87.3f : x;
  const Vector count = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vector r = (clamped - count * 0.693359375f) - count * -2.12194440e-4f;
  Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integers bits = (__builtin_convertvector(count, Integers) + 127) << 23;
  const Vector scaled = y * reinterpret_cast<const Vector&>(bits);
  return x < -87.3f ? Vector{} : scaled;
}

// Replaces a row by its softmax or log softmax; the width must be a multiple of kLanes.
FOR_EACH_CPU void softmax_row(float* row, float* powers, int64_t width, bool is_log) {
  Vector maxima = Vector{} - std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vector x = *reinterpret_cast<const Vector*>(row + j);
    maxima = x > maxima ? x : maxima;
  }
  float largest = maxima[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    largest = std::max(largest, maxima[lane]);
  }
  double sum = 0.0;
  for (int64_t j = 0; j < width; j += kLanes) {
    const Vector x = *reinterpret_cast<const Vector*>(row + j) - largest;
    *reinterpret_cast<Vector*>(powers + j) = exponential(x);
    for (int lane = 0; lane < kLanes; ++lane) {
      sum += powers[j + lane];
    }
  }
  const float total = static_cast<float>(sum), logarithm = static_cast<float>(std::log(sum));
  for (int64_t j = 0; j < width; ++j) {
    row[j] = is_log ? row[j] - largest - logarithm : powers[j] / total;
  }
}

at::Tensor softmax(const at::Tensor& input, int64_t dim, at::ScalarType dtype, bool is_log) {
  const at::Tensor moved = input.movedim(dim, -1);
  const at::Tensor x = moved.reshape({moved.numel() / std::max<int64_t>(moved.size(-1), 1), moved.size(-1)});
  const int64_t rows = x.size(0), size = x.size(1), width = (size + kLanes - 1) / kLanes * kLanes;
  const at::Tensor out = at::empty({rows, size}, x.options().dtype(dtype));
  const Matrix in = matrix(x);
  at::parallel_for(0, rows, 1 + 32768 / (size + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> row(width), powers(width);
    for (int64_t i = begin; i < end; ++i) {
      load(row.data(), in, i * in.row, 1, size, width);
      std::fill(row.begin() + size, row.end(), -std::numeric_limits<float>::infinity());
      softmax_row(row.data(), powers.data(), width, is_log);
      store(row.data(), out, i * size, size);
    }
  });
  return out.view(moved.sizes()).movedim(-1, dim).contiguous();
}

// Sums or means along dimensions, accumulated from the first element to the last.
at::Tensor sum(const at::Tensor& input, at::IntArrayRef dims, bool keepdim, at::ScalarType dtype, bool is_mean) {
  std::vector<int64_t> order, summed, sizes;
  int64_t rows = 1, size = 1;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    const auto is_this = [&](int64_t other) { return (other + input.dim()) % input.dim() == dim; };
    const bool is_summed = std::any_of(dims.begin(), dims.end(), is_this);
    (is_summed ? summed : order).push_back(dim);
    (is_summed ? size : rows) *= input.size(dim);
    if (!is_summed || keepdim) {
      sizes.push_back(is_summed ? 1 : input.size(dim));
    }
  }
  order.insert(order.end(), summed.begin(), summed.end());
  const at::Tensor x = input.permute(order).reshape({rows, size});
  const at::Tensor out = at::empty(sizes, x.options().dtype(dtype));
  const Matrix in = matrix(x);
  const double count = is_mean ? size : 1;
  at::parallel_for(0, (rows + kRows - 1) / kRows, 1 + 8192 / (size + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> block(kRows * size);
    for (int64_t i = begin * kRows; i < std::min(end * kRows, rows); i += kRows) {
      const int64_t height = std::min<int64_t>(kRows, rows - i);
      double sums[kRows] = {};
      float rounded[kRows];
      load(block.data(), in, i * in.row, height, size, size);
      for (int64_t j = 0; j < size; ++j) {
        for (int r = 0; r < kRows; ++r) {
          sums[r] += block[r * size + j];
        }
      }
      for (int r = 0; r < kRows; ++r) {
        rounded[r] = static_cast<float>(sums[r] / count);
      }
      store(rounded, out, i, height);
    }
  });
  return out;
}

constexpr int64_t kWhole = 64;  // a multiple of the vector size of every dtype in all loops of ATen

// Calls a pointwise op of ATen on full vectors. ATen computes the tail of a loop, and strided
// tensors, with scalar code, which returns different bits (exp, for example).
void pointwise(const c10::OperatorHandle& row_op, c10::Stack* stack) {
  const std::string name = row_op.schema().name();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      ("aten" + name.substr(name.find(':'))).c_str(), row_op.schema().overload_name().c_str());
  c10::Stack arguments = torch::jit::pop(*stack, row_op.schema().arguments().size());
  std::vector<int64_t> sizes, positions;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor() && arguments[i].toTensor().dim() > 0) {
      sizes = at::infer_size(sizes, arguments[i].toTensor().sizes());
      positions.push_back(i);
    }
  }
  const int64_t size = c10::multiply_integers(sizes), padded = (size + kWhole - 1) / kWhole * kWhole;
  for (int64_t i : positions) {
    const at::Tensor x = arguments[i].toTensor().expand(sizes).reshape({size});
    arguments[i] = size == padded ? x.contiguous() : at::constant_pad_nd(x, {0, padded - size});
  }
  const auto call = [&](int64_t begin, int64_t end) {
    c10::Stack slices = arguments;
    for (int64_t i : positions) {
      slices[i] = arguments[i].toTensor().slice(0, begin * kWhole, end * kWhole);
    }
    op.callBoxed(slices);
    return slices[0].toTensor();
  };
  const at::Tensor out = at::empty({padded}, call(0, 0).options());
  at::parallel_for(0, padded / kWhole, 128, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;
    out.slice(0, begin * kWhole, end * kWhole).copy_(call(begin, end));
  });
  torch::jit::push(*stack, out.slice(0, 0, size).view(sizes));
}

bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  return schema.name().rfind("aten::", 0) == 0 && op.hasTag(at::Tag::pointwise) && !schema.is_mutable() &&
      schema.returns().size() == 1 && schema.returns()[0].alias_info() == nullptr;
}

TORCH_LIBRARY(amp_fx_rows, library) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (op.has_value() && is_pointwise(*op)) {
      const std::string row_name = "amp_fx_rows" + name.name.substr(name.name.find(':'));
      library.def(op->schema().cloneWithName(row_name, name.overload_name));
      const std::string full = name.overload_name.empty() ? row_name : row_name + "." + name.overload_name;
      library.impl(full.c_str(), c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&pointwise>());
    }
  }
}

TORCH_LIBRARY_FRAGMENT(amp_fx, library) {
  library.def("ordered_product(Tensor left, Tensor right, Tensor? bias, float beta, float alpha) -> Tensor");
  library.def("ordered_grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor");
  library.def("ordered_softmax(Tensor x, int dim, ScalarType dtype, bool is_log) -> Tensor");
  library.def("ordered_sum(Tensor x, int[] dims, bool keeps, ScalarType dtype, bool is_mean) -> Tensor");
}

TORCH_LIBRARY_IMPL(amp_fx, CPU, library) {
  library.impl("ordered_product", product);
  library.impl("ordered_grouped_product", grouped_product);
  library.impl("ordered_softmax", softmax);
  library.impl("ordered_sum", sum);
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "amp_fx_rows", nullptr, -1};

} // namespace

PyMODINIT_FUNC PyInit_amp_fx_rows() {
  return PyModule_Create(&definition);
}
