// Included (as text) after prelude.h: the merging steps of reductions that OpenMP does not know. A `row` function
// takes a chunk of a row, t[0..count), and merges it into what the chunks before gave; a `column` function takes one
// element into the state of its column, and is called in a lane loop, so it must not branch.

// ---- a sum in several vectors: in one, each addition would wait for the last
template <class T, class F> MC T mc_sum(int64_t count, F term) {
  T sum = 0, rest = 0, parts[32] = {};
  int64_t done = 0;
  for (; done + 32 <= count; done += 32)
#pragma omp simd
    for (int64_t k = 0; k < 32; k++) parts[k] += term(done + k);
  if (done)
#pragma omp simd reduction(+:sum)
    for (int64_t k = 0; k < 32; k++) sum += parts[k];
#pragma omp simd reduction(+:rest)
  for (int64_t k = done; k < count; k++) rest += term(k);
  return sum + rest;
}

// ---- partial sums, folded by halves where a vector has sixteen: one by one, each addition would wait for the last
#ifdef __AVX512F__
typedef float mc_row __attribute__((vector_size(64)));
#ifdef __clang__
#define MC_MOVED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
typedef int32_t mc_places __attribute__((vector_size(64)));
#define MC_MOVED(x, ...) __builtin_shuffle(x, mc_places{__VA_ARGS__})
#endif
MC float mc_folded(mc_row x) {
  x += MC_MOVED(x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  x += MC_MOVED(x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  x += MC_MOVED(x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  return x[0] + x[1];
}
template <int n> MC float mc_fold(const float* parts) {
  const mc_row* vectors = (const mc_row*)parts;
  if constexpr (n == 16) return mc_folded(vectors[0]);
  else if constexpr (n == 32) return mc_folded(vectors[0] + vectors[1]);
  else return mc_folded((vectors[0] + vectors[1]) + (vectors[2] + vectors[3]));  // n is 64
}
// the larger, or smaller, of each pair; a NaN of x is passed over
#if defined(__clang__) || !defined(__AVX512F__)
#define MC_MOST(name, op, instruction)                                                     \
  template <int n> MC void name(float* most, const float* x) {                             \
    for (int64_t k = 0; k < n; k++) most[k] = x[k] op most[k] ? x[k] : most[k];            \
  }
#else
#define MC_MOST(name, op, instruction)                                                     \
  template <int n> MC void name(float* most, const float* x) {                             \
    mc_row *a = (mc_row*)most, *b = (mc_row*)x;                                            \
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < n / 16; k++)                           \
      a[k] = __builtin_ia32_##instruction##512_mask(b[k], a[k], a[k], -1, 4);              \
  }
#endif
MC_MOST(mc_most_max, >, maxps)
MC_MOST(mc_most_min, <, minps)
#else
template <int n> MC float mc_fold(const float* parts) {
  float sum = 0;
#pragma omp simd reduction(+:sum)
  for (int64_t k = 0; k < n; k++) sum += parts[k];
  return sum;
}
#endif

// ---- Welford: mean and sum of squared differences of two samples, merged
template <class T> MC void mc_row_welford(const T* t, int64_t count, double& mean, double& m2, double& seen) {
  const T centre = mc_sum<T>(count, [=](int64_t k) { return t[k]; }) / count;
  const T square = mc_sum<T>(count, [=](int64_t k) { const T d = t[k] - centre; return d * d; });
  const double delta = centre - mean, all = seen + count;
  m2 += square + delta * delta * seen * count / all;
  mean += delta * count / all;
  seen = all;
}
// The mean is `mean + rest`. Now and then, which is the same for all columns, what `mean` has digits for goes there from `rest`. So
// nothing is lost of many numbers that are alike, nor after one that is much larger than the others.
template <class T> MC void mc_column_welford(T x, T inverse, bool settle, T& mean, T& rest, T& m2) {  // inverse = 1 / elements so far
  const T sum = mean + rest;
  rest = settle ? rest - (sum - mean) : rest;
  mean = settle ? sum : mean;
  const T distance = x - mean, delta = distance - rest;
  rest += delta * inverse;
  m2 += delta * (distance - rest);
}
template <class T> MC void mc_column_flush(T& mean, T& rest, T& m2, T count, double& centre, double& spread, double all) {
  const double gap = mean - centre + rest, share = count / (all + count);
  centre += gap * share;
  spread += m2 + gap * gap * all * share;
  mean = 0;
  rest = 0;
  m2 = 0;
}

// ---- positions: the first of equal extremes wins, and NaN is more extreme than any number
template <bool largest, class T> MC bool mc_beats(T a, int64_t i, T b, int64_t j) {  // j < 0: there is no b yet
  if (j < 0) return true;
  if (a == b || (a != a && b != b)) return i < j;
  return b == b && (a != a || (largest ? a > b : a < b));
}
template <class T> MC T mc_largest(const T* t, int64_t count) {
  T top = t[0];
  int bad = 0;
#pragma omp simd reduction(max:top) reduction(|:bad)
  for (int64_t k = 0; k < count; k++) { top = t[k] > top ? t[k] : top; bad |= t[k] != t[k]; }
  return bad ? (T)MC_NAN : top;
}
template <class T> MC T mc_smallest(const T* t, int64_t count) {
  T top = t[0];
  int bad = 0;
#pragma omp simd reduction(min:top) reduction(|:bad)
  for (int64_t k = 0; k < count; k++) { top = t[k] < top ? t[k] : top; bad |= t[k] != t[k]; }
  return bad ? (T)MC_NAN : top;
}
template <class T> MC int64_t mc_find(const T* t, T x) {
  int64_t k = 0;
  while (!(t[k] == x || (t[k] != t[k] && x != x))) k++;
  return k;
}
template <bool largest, class T> MC void mc_column_extreme(T x, int64_t here, T& best, int64_t& at) {
  const bool better = (best == best) & ((largest ? x > best : x < best) | (x != x));
  best = better ? x : best;
  at = better ? here : at;
}
