// The fast paths of optimus::grouped_mlp and optimus::reduce_outputs on a CPU, called through cpu.py.
//
// grouped_mlp goes expert by expert, so that an expert's rows are gathered, multiplied and activated while they are in
// cache, and everything between two products is one pass. Experts run in parallel as long as none has more than a
// thread's share of the rows; else one after the other, each product using all threads.
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

template <typename T>
at::Tensor matrix(const T* data, int64_t rows, int64_t columns, int64_t pitch = 0) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  return at::from_blob(const_cast<T*>(data), {rows, columns}, {pitch ? pitch : columns, 1}, options);
}

// The three products of an expert: with tables [N, K] and [K, N], and the gradient of a table. `room` is scratch memory.
// Where C is T they are torch's, or those of bf16_products.h; else tables are widened, and results narrowed, block by
// block, so that what is widened stays in cache.

constexpr int64_t BLOCK = 1 << 17;  // elements

int64_t block_rows(int64_t row_size) { return std::max<int64_t>(32, BLOCK / row_size); }

// out[M, N] = a[M, K] @ table[N, K]^T
template <typename C, typename T>
void multiply_transposed(const C* a, const T* table, T* out, int64_t M, int64_t N, int64_t K, C* room) {
  if constexpr (std::is_same_v<C, T>) {
#ifdef BF16_PRODUCTS
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (N % 16 == 0 && K % 32 == 0) {
        const auto pack = [&](int64_t first, int64_t columns, int32_t* to) {
          bf16_products::pack_transposed(table + first * K, K, columns, to);
        };
        return bf16_products::multiply(bf16_products::rows_of(a, K), out, M, N, K / 2, false, pack);
      }
    }
#endif
    at::Tensor result = matrix(out, M, N);
    at::mm_out(result, matrix(a, M, K), matrix(table, N, K).t());
  } else {
    const int64_t step = block_rows(K);
    C* product = room + step * K;
    for (int64_t n = 0; n < N; n += step) {
      const int64_t columns = std::min(step, N - n);
      copy(table + n * K, room, columns * K);
      at::Tensor result = matrix(product, M, columns);
      at::mm_out(result, matrix(a, M, K), matrix(room, columns, K).t());
      for (int64_t m = 0; m < M; ++m) {
        copy(product + m * columns, out + m * N + n, columns);
      }
    }
  }
}

// out[M, N] = a[M, K] @ table[K, N]
template <typename C, typename T, typename Out>
void multiply(const C* a, const T* table, Out* out, int64_t M, int64_t N, int64_t K, C* room) {
  if constexpr (std::is_same_v<C, T>) {
#ifdef BF16_PRODUCTS
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (N % 16 == 0 && K % 2 == 0) {
        const auto pack = [&](int64_t first, int64_t columns, int32_t* to) {
          bf16_products::pack(table + first, K, columns, N, to);
        };
        return bf16_products::multiply(bf16_products::rows_of(a, K), out, M, N, K / 2, false, pack);
      }
    }
#endif
    at::Tensor result = matrix(out, M, N);
    at::mm_out(result, matrix(a, M, K), matrix(table, K, N));
  } else {
    const int64_t step = block_rows(N);
    C* product = room + step * N;
    at::Tensor sum = matrix(product, M, N);
    for (int64_t k = 0; k < K; k += step) {
      const int64_t rows = std::min(step, K - k);
      copy(table + k * N, room, rows * N);
      if (k) {
        at::addmm_out(sum, sum, matrix(a + k, M, rows, K), matrix(room, rows, N));
      } else {
        at::mm_out(sum, matrix(a, M, rows, K), matrix(room, rows, N));
      }
    }
    copy(product, out, M * N);
  }
}

// gradient[M, N] += a[K, M]^T @ b[K, N], or = where there is nothing yet
template <typename C, typename G>
void multiply_into(const C* a, const C* b, G* gradient, bool adds, int64_t M, int64_t N, int64_t K, C* room) {
#ifdef BF16_PRODUCTS
  if constexpr (std::is_same_v<C, at::BFloat16>) {
    if (M % 16 == 0 && N % 16 == 0) {
      int32_t* left = reinterpret_cast<int32_t*>(room);
      bf16_products::pack(a, K, M, M, left);
      const auto pack = [&](int64_t first, int64_t columns, int32_t* to) {
        bf16_products::pack(b + first, K, columns, N, to);
      };
      return bf16_products::multiply({left, 1, M}, gradient, M, N, (K + 1) / 2, adds, pack);
    }
  }
#endif
  if constexpr (std::is_same_v<C, G>) {
    at::Tensor sum = matrix(gradient, M, N);
    if (adds) {
      at::addmm_out(sum, sum, matrix(a, K, M).t(), matrix(b, K, N));
    } else {
      at::mm_out(sum, matrix(a, K, M).t(), matrix(b, K, N));
    }
  } else {
    const int64_t step = block_rows(N);
    for (int64_t m = 0; m < M; m += step) {
      const int64_t rows = std::min(step, M - m);
      at::Tensor product = matrix(room, rows, N);
      at::mm_out(product, matrix(a + m, K, rows, M).t(), matrix(b, K, N));
      for (int64_t i = 0; i < rows * N; i += LANES) {
        const int64_t n = std::min(LANES, rows * N - i);
        const Lanes before = adds ? read(gradient + m * N + i, n) : Lanes(0);
        write(before + read(room + i, n), gradient + m * N + i, n);
      }
    }
  }
}

// `from` in the dtype of products: itself, or widened into scratch
template <typename C, typename T>
const C* widened(const T* from, int64_t size, C* scratch) {
  if constexpr (std::is_same_v<C, T>) {
    return from;
  } else {
    copy(from, scratch, size);
    return scratch;
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
    C *x_rH = own, *h_rI = x_rH + most_rows * hidden, *room = h_rI + most_rows * width;
    T* gate_up_r2I = gate_up_R2I + first * 2 * width;

    gather(x_TH, token_R + first, x_rH, rows, hidden);
    multiply_transposed(x_rH, gate_up_E2IH + e * 2 * width * hidden, gate_up_r2I, rows, 2 * width, hidden, room);
    activate(gate_up_r2I, weight_R + first, h_rI, rows, width);
    multiply_transposed(h_rI, down_EHI + e * hidden * width, y_RH + first * hidden, rows, hidden, width, room);
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
    C *dgate_up_r2I = dh_rI + most_rows * width, *room = dgate_up_r2I + most_rows * 2 * width;

    const C* dy_rH = widened(dy_RH + first * hidden, rows * hidden, rows_rH);
    multiply(dy_rH, down_EHI + e * hidden * width, dh_rI, rows, width, hidden, room);
    activate_backward(gate_up_R2I + first * 2 * width, dh_rI, weight_R + first, h_rI, dgate_up_r2I, dweight_R + first,
                      rows, width);
    multiply_into(dy_rH, h_rI, ddown_EHI + e * hidden * width, adds, hidden, width, rows, room);
    multiply(dgate_up_r2I, gate_up_E2IH + e * 2 * width * hidden, dx_RH + first * hidden, rows, hidden, 2 * width,
             room);
    gather(x_TH, token_R + first, rows_rH, rows, hidden);
    multiply_into(dgate_up_r2I, rows_rH, dgate_up_E2IH + e * 2 * width * hidden, adds, 2 * width, hidden, rows, room);
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
