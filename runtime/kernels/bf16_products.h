// Products of bf16 matrices for CPUs with AVX-512 BF16: put before cpu.cpp.
//
// torch's own spend an eighth of their time on preparing the call when an expert has a hundred rows. Here 64 columns of
// the right operand are packed in the order in which they are read, and 6 rows by 64 columns are summed up in registers.

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BF16_PRODUCTS
#include <ATen/cpu/vec/vec.h>
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <algorithm>
#include <type_traits>
#include <vector>

namespace bf16_products {

constexpr int64_t PANEL = 64;  // columns that are summed together
constexpr int64_t AHEAD = 8;  // rows, or cache lines of a row, that are fetched before they are packed

// The left operand in pairs along K, as int32: pair (m, k / 2) lies at pairs[m * row_step + k / 2 * pair_step]
struct Left {
  const int32_t* pairs;
  int64_t row_step, pair_step;
};

inline Left rows_of(const at::BFloat16* a_MK, int64_t K) { return {reinterpret_cast<const int32_t*>(a_MK), K / 2, 1}; }

// `columns` of the rows k and k + 1 of a matrix with `pitch` columns, interleaved, for every even k; an odd row at the
// end is paired with zeros. A multiple of 16 columns
inline void pack(const at::BFloat16* from, int64_t K, int64_t columns, int64_t pitch, int32_t* to) {
  for (int64_t k = 0; k < K; k += 2, to += columns) {
    const auto *low = from + k * pitch, *high = low + pitch;
    for (int64_t n = 0; n < columns; n += 32) {
      _mm_prefetch(low + AHEAD * pitch + n, _MM_HINT_T0);
      _mm_prefetch(high + AHEAD * pitch + n, _MM_HINT_T0);
    }
    for (int64_t n = 0; n < columns; n += 16) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + n)));
      __m512i b = _mm512_setzero_si512();
      if (k + 1 < K) {
        b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + n)));
      }
      _mm512_storeu_si512(to + n, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
  }
}

// The same of the transpose of [columns, K], whose rows hold the pairs already. A multiple of 16 columns, K of 32
inline void pack_transposed(const at::BFloat16* from, int64_t K, int64_t columns, int32_t* to) {
  const auto* pairs = reinterpret_cast<const float*>(from);
  auto* packed = reinterpret_cast<float*>(to);
  for (int64_t n = 0; n < columns; n += 16) {
    for (int64_t k = 0; k < K / 2; k += 16) {
      for (int64_t row = 0; row < 16; ++row) {
        _mm_prefetch(pairs + (n + row) * K / 2 + k + 16 * AHEAD, _MM_HINT_T0);
      }
      at::vec::transpose_mxn<float, 16, 16>(pairs + n * K / 2 + k, K / 2, packed + k * columns + n, columns);
    }
  }
}

template <typename Out>
void store(__m512 sum, Out* to, bool adds) {
  if constexpr (std::is_same_v<Out, float>) {
    _mm512_storeu_ps(to, adds ? _mm512_add_ps(sum, _mm512_loadu_ps(to)) : sum);
  } else {
    auto* bits = reinterpret_cast<__m256i*>(to);
    if (adds) {
      const __m512i before = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(bits)), 16);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(before));
    }
    _mm256_storeu_si256(bits, (__m256i)_mm512_cvtneps_pbh(sum));
  }
}

// ROWS by 16 * VECTORS of the result
template <int ROWS, int VECTORS, typename Out>
void tile(Left a, const int32_t* b, Out* out, int64_t pitch, int64_t pairs, bool adds) {
  __m512 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      _mm_prefetch(out + r * pitch + v * 16, _MM_HINT_T0);
      sums[r][v] = _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i columns[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      columns[v] = _mm512_loadu_si512(b + (k * VECTORS + v) * 16);
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m512i pair = _mm512_set1_epi32(a.pairs[r * a.row_step + k * a.pair_step]);
      for (int v = 0; v < VECTORS; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)pair, (__m512bh)columns[v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      store(sums[r][v], out + r * pitch + v * 16, adds);
    }
  }
}

template <int VECTORS, typename Out>
void panel(Left a, const int32_t* b, Out* out, int64_t M, int64_t pitch, int64_t pairs, bool adds) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6) {
    tile<6, VECTORS>({a.pairs + m * a.row_step, a.row_step, a.pair_step}, b, out + m * pitch, pitch, pairs, adds);
  }
  const Left rest{a.pairs + m * a.row_step, a.row_step, a.pair_step};
  out += m * pitch;
  switch (M - m) {
    case 1: tile<1, VECTORS>(rest, b, out, pitch, pairs, adds); break;
    case 2: tile<2, VECTORS>(rest, b, out, pitch, pairs, adds); break;
    case 3: tile<3, VECTORS>(rest, b, out, pitch, pairs, adds); break;
    case 4: tile<4, VECTORS>(rest, b, out, pitch, pairs, adds); break;
    case 5: tile<5, VECTORS>(rest, b, out, pitch, pairs, adds); break;
    default: break;
  }
}

// out[M, N] (+)= a[M, K] @ b[K, N], N a multiple of 16. pack_panel(first column, columns, to) packs a panel of b, which is
// read while it is in cache
template <typename Out, typename Pack>
void multiply(Left a, Out* out, int64_t M, int64_t N, int64_t pairs, bool adds, const Pack& pack_panel) {
  at::parallel_for(0, (N + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<int32_t> packed;
    packed.resize(pairs * PANEL);
    for (int64_t n = begin * PANEL; n < std::min(end * PANEL, N); n += PANEL) {
      const int64_t columns = std::min(PANEL, N - n);
      pack_panel(n, columns, packed.data());
      switch (columns / 16) {
        case 4: panel<4>(a, packed.data(), out + n, M, N, pairs, adds); break;
        case 3: panel<3>(a, packed.data(), out + n, M, N, pairs, adds); break;
        case 2: panel<2>(a, packed.data(), out + n, M, N, pairs, adds); break;
        default: panel<1>(a, packed.data(), out + n, M, N, pairs, adds); break;
      }
    }
  });
}

}  // namespace bf16_products
#endif
