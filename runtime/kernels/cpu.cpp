// The fast paths of optimus::grouped_mlp and optimus::reduce_outputs on a CPU, called through cpu.py.
//
// grouped_mlp goes expert by expert, so that an expert's rows are gathered, multiplied and activated while they are in cache; matrix
// products are torch's own, and everything between two of them is one pass. Experts run in parallel as long as none has
// more than a thread's share of the rows; else one after the other, each product using all threads.
//
// T: dtype of activations and weights. C: dtype that this CPU multiplies fast, T or float. G: dtype of weight gradients.
// Shape suffixes: index_tokens.py; r is the rows of one expert.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>
#include <algorithm>
#include <cstring>
#include <type_traits>

namespace {

using Lanes = at::vec::Vectorized<float>;
constexpr int64_t LANES = Lanes::size();
constexpr int64_t GRAIN = 32;  // rows; fewer are not worth a thread

template <typename T>
Lanes read(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return Lanes::loadu(from, count);
  } else {
    return at::vec::convert<float>(at::vec::Vectorized<T>::loadu(from, count));
  }
}

template <typename T>
void write(const Lanes& value, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    value.store(to, count);
  } else {
    at::vec::convert<T>(value).store(to, count);
  }
}

// to[i] = from[i], in another dtype
template <typename To, typename From>
void copy(const From* from, To* to, int64_t size) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(to, from, size * sizeof(To));
  } else {
    for (int64_t i = 0; i < size; i += LANES) {
      const int64_t n = std::min(LANES, size - i);
      write(read(from + i, n), to + i, n);
    }
  }
}

// `from` in the dtype of products: itself, or widened into scratch
template <typename C, typename T>
const C* widened(const T* from, int64_t size, C* scratch) {
  if constexpr (std::is_same_v<C, T>) {
    return from;
  } else {
    at::parallel_for(0, size, GRAIN * 1024, [&](int64_t begin, int64_t end) {
      copy(from + begin, scratch + begin, end - begin);
    });
    return scratch;
  }
}

template <typename T>
at::Tensor matrix(const T* data, int64_t rows, int64_t columns) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  return at::from_blob(const_cast<T*>(data), {rows, columns}, options);
}

// out = a @ b, rounded once
template <typename C, typename T>
void multiply(T* out, const at::Tensor& a, const at::Tensor& b, C* scratch) {
  const int64_t rows = a.size(0), columns = b.size(1);
  if constexpr (std::is_same_v<C, T>) {
    at::Tensor result = matrix(out, rows, columns);
    at::mm_out(result, a, b);
  } else {
    at::Tensor result = matrix(scratch, rows, columns);
    at::mm_out(result, a, b);
    copy(scratch, out, rows * columns);
  }
}

// gradient += a @ b, or = where there is nothing yet
template <typename C, typename G>
void accumulate(G* gradient, bool adds, const at::Tensor& a, const at::Tensor& b, C* scratch) {
  if constexpr (std::is_same_v<C, G>) {
    at::Tensor sum = matrix(gradient, a.size(0), b.size(1));
    if (adds) {
      at::addmm_out(sum, sum, a, b);
    } else {
      at::mm_out(sum, a, b);
    }
  } else {
    at::Tensor product = matrix(scratch, a.size(0), b.size(1));
    at::mm_out(product, a, b);
    at::parallel_for(0, product.numel(), GRAIN * 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += LANES) {
        const int64_t n = std::min(LANES, end - i);
        const Lanes before = adds ? read(gradient + i, n) : Lanes(0);
        write(before + read(scratch + i, n), gradient + i, n);
      }
    });
  }
}

template <typename C, typename T>
void gather(const T* x_TH, const int64_t* token_r, C* x_rH, int64_t rows, int64_t hidden) {
  at::parallel_for(0, rows, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      copy(x_TH + token_r[r] * hidden, x_rH + r * hidden, hidden);
    }
  });
}

// h = silu(gate) * up * weight
template <typename C, typename T>
void activate(const T* gate_up_r2I, const float* weight_r, C* h_rI, int64_t rows, int64_t width) {
  at::parallel_for(0, rows, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *gates = gate_up_r2I + r * 2 * width, *ups = gates + width;
      const Lanes weight(weight_r[r]);
      for (int64_t i = 0; i < width; i += LANES) {
        const int64_t n = std::min(LANES, width - i);
        const Lanes gate = read(gates + i, n), up = read(ups + i, n);
        write(gate / (Lanes(1) + gate.neg().exp_u20()) * up * weight, h_rI + r * width + i, n);
      }
    }
  });
}

// From dh: h again, the gradient of gate and up, and that of the weight, <dh, silu(gate) * up>
template <typename C, typename T>
void activate_backward(const T* gate_up_r2I, const C* dh_rI, const float* weight_r, C* h_rI, C* dgate_up_r2I,
                       float* dweight_r, int64_t rows, int64_t width) {
  at::parallel_for(0, rows, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *gates = gate_up_r2I + r * 2 * width, *ups = gates + width;
      C *dgates = dgate_up_r2I + r * 2 * width, *dups = dgates + width;
      const Lanes weight(weight_r[r]);
      Lanes sum(0);
      for (int64_t i = 0; i < width; i += LANES) {
        const int64_t n = std::min(LANES, width - i);
        const Lanes gate = read(gates + i, n), up = read(ups + i, n), dh = read(dh_rI + r * width + i, n);
        const Lanes sigmoid = Lanes(1) / (Lanes(1) + gate.neg().exp_u20());
        const Lanes silu = gate * sigmoid, act = silu * up, dact = dh * weight;
        sum = sum + dh * act;
        write(act * weight, h_rI + r * width + i, n);
        write(dact * up * sigmoid * (Lanes(1) + gate - silu), dgates + i, n);
        write(dact * silu, dups + i, n);
      }
      float lanes[LANES];
      sum.store(lanes);
      dweight_r[r] = 0;
      for (float lane : lanes) {
        dweight_r[r] += lane;
      }
    }
  });
}

// run(expert, first row, rows, this thread's scratch) for every expert that has rows
template <typename C, typename Run>
void for_each_expert(const int32_t* offsets_E, int64_t experts, int64_t threads, C* scratch, int64_t scratch_size,
                     const Run& run) {
  int64_t largest = 0, all = experts ? offsets_E[experts - 1] : 0;
  for (int64_t e = 0; e < experts; ++e) {
    largest = std::max<int64_t>(largest, offsets_E[e] - (e ? offsets_E[e - 1] : 0));
  }
  const bool in_parallel = largest * threads <= all;
#pragma omp parallel num_threads(in_parallel ? threads : 1)
  {
    c10::InferenceMode guard;
    C* own_scratch = scratch + omp_get_thread_num() * scratch_size;
#pragma omp for schedule(dynamic)
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = e ? offsets_E[e - 1] : 0, rows = offsets_E[e] - first;
      if (rows) {
        run(e, first, rows, own_scratch);
      }
    }
  }
}

template <typename T, typename C>
void forward(const T* x_TH, const float* weight_R, const T* gate_up_E2IH, const T* down_EHI, const int64_t* token_R,
             const int32_t* offsets_E, T* gate_up_R2I, T* y_RH, C* scratch, int64_t experts, int64_t hidden,
             int64_t width, int64_t most_rows, int64_t threads, int64_t scratch_size) {
  for_each_expert(offsets_E, experts, threads, scratch, scratch_size,
                  [&](int64_t e, int64_t first, int64_t rows, C* own) {
    C *x_rH = own, *h_rI = x_rH + most_rows * hidden, *product = h_rI + most_rows * width;
    C *gate_up = product + most_rows * std::max(hidden, 2 * width), *down = gate_up + 2 * width * hidden;
    T* gate_up_r2I = gate_up_R2I + first * 2 * width;

    gather(x_TH, token_R + first, x_rH, rows, hidden);
    const C* up_2IH = widened(gate_up_E2IH + e * 2 * width * hidden, 2 * width * hidden, gate_up);
    multiply(gate_up_r2I, matrix(x_rH, rows, hidden), matrix(up_2IH, 2 * width, hidden).t(), product);
    activate(gate_up_r2I, weight_R + first, h_rI, rows, width);
    const C* down_HI = widened(down_EHI + e * hidden * width, hidden * width, down);
    multiply(y_RH + first * hidden, matrix(h_rI, rows, width), matrix(down_HI, hidden, width).t(), product);
  });
}

template <typename T, typename C, typename G>
void backward(const T* dy_RH, const T* x_TH, const float* weight_R, const T* gate_up_E2IH, const T* down_EHI,
              const int64_t* token_R, const int32_t* offsets_E, const T* gate_up_R2I, T* dx_RH, float* dweight_R,
              G* dgate_up_E2IH, G* ddown_EHI, C* scratch, int64_t adds, int64_t experts, int64_t hidden, int64_t width,
              int64_t most_rows, int64_t threads, int64_t scratch_size) {
  for_each_expert(offsets_E, experts, threads, scratch, scratch_size,
                  [&](int64_t e, int64_t first, int64_t rows, C* own) {
    C *rows_rH = own, *h_rI = rows_rH + most_rows * hidden, *dh_rI = h_rI + most_rows * width;
    C *dgate_up_r2I = dh_rI + most_rows * width, *table = dgate_up_r2I + most_rows * 2 * width;
    C* product = table + 2 * width * hidden;

    const at::Tensor dy = matrix(widened(dy_RH + first * hidden, rows * hidden, rows_rH), rows, hidden);
    const at::Tensor down = matrix(widened(down_EHI + e * hidden * width, hidden * width, table), hidden, width);
    multiply(dh_rI, dy, down, product);
    activate_backward(gate_up_R2I + first * 2 * width, dh_rI, weight_R + first, h_rI, dgate_up_r2I, dweight_R + first,
                      rows, width);
    accumulate(ddown_EHI + e * hidden * width, adds, dy.t(), matrix(h_rI, rows, width), product);

    const at::Tensor dgate_up = matrix(dgate_up_r2I, rows, 2 * width);
    const C* up_2IH = widened(gate_up_E2IH + e * 2 * width * hidden, 2 * width * hidden, table);
    multiply(dx_RH + first * hidden, dgate_up, matrix(up_2IH, 2 * width, hidden), product);
    gather(x_TH, token_R + first, rows_rH, rows, hidden);
    accumulate(dgate_up_E2IH + e * 2 * width * hidden, adds, dgate_up.t(), matrix(rows_rH, rows, hidden), product);
  });
}

// out[t] = sum over k of y[row[t, k]], in fp32, rounded once; row -1: none
template <typename T>
void sum_rows(const T* y_RH, const int64_t* row_TK, T* out_TH, int64_t tokens, int64_t choices, int64_t hidden,
              int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < hidden; i += LANES) {
      const int64_t n = std::min(LANES, hidden - i);
      Lanes sum(0);
      for (int64_t k = 0; k < choices; ++k) {
        const int64_t row = row_TK[t * choices + k];
        if (row >= 0) {
          sum = sum + read(y_RH + row * hidden + i, n);
        }
      }
      write(sum, out_TH + t * hidden + i, n);
    }
  }
}

}  // namespace

using bf16 = at::BFloat16;

#define FORWARD(NAME, T, C)                                                                                           \
  extern "C" void NAME(const T* x, const float* weight, const T* gate_up, const T* down, const int64_t* token,        \
                       const int32_t* offsets, T* saved, T* y, C* scratch, int64_t experts, int64_t hidden,           \
                       int64_t width, int64_t most_rows, int64_t threads, int64_t scratch_size) {                     \
    forward(x, weight, gate_up, down, token, offsets, saved, y, scratch, experts, hidden, width, most_rows, threads,  \
            scratch_size);                                                                                            \
  }

#define BACKWARD(NAME, T, C, G)                                                                                       \
  extern "C" void NAME(const T* dy, const T* x, const float* weight, const T* gate_up, const T* down,                 \
                       const int64_t* token, const int32_t* offsets, const T* saved, T* dx, float* dweight,           \
                       G* dgate_up, G* ddown, C* scratch, int64_t adds, int64_t experts, int64_t hidden,              \
                       int64_t width, int64_t most_rows, int64_t threads, int64_t scratch_size) {                     \
    backward(dy, x, weight, gate_up, down, token, offsets, saved, dx, dweight, dgate_up, ddown, scratch, adds,        \
             experts, hidden, width, most_rows, threads, scratch_size);                                               \
  }

// NAME: direction, T, C, G
FORWARD(forward_float32_float32, float, float)
FORWARD(forward_bfloat16_bfloat16, bf16, bf16)
FORWARD(forward_bfloat16_float32, bf16, float)
BACKWARD(backward_float32_float32_float32, float, float, float)
BACKWARD(backward_bfloat16_bfloat16_bfloat16, bf16, bf16, bf16)
BACKWARD(backward_bfloat16_bfloat16_float32, bf16, bf16, float)
BACKWARD(backward_bfloat16_float32_bfloat16, bf16, float, bf16)
BACKWARD(backward_bfloat16_float32_float32, bf16, float, float)

#define SUM_ROWS(NAME, T)                                                                                             \
  extern "C" void NAME(const T* y, const int64_t* row, T* out, int64_t tokens, int64_t choices, int64_t hidden,       \
                       int64_t threads) {                                                                             \
    sum_rows(y, row, out, tokens, choices, hidden, threads);                                                          \
  }

SUM_ROWS(sum_rows_float32, float)
SUM_ROWS(sum_rows_bfloat16, bf16)
