// One step of Adam(W) over a flat subgroup, in one pass over memory.
//
// Reads the gradient in its wire precision, folds unscale and clip into one factor, updates the fp32
// master and moments in place and writes the wire-precision parameter. Per element the fp32 operations
// and their order are those of DeepSpeedCPUAdam (ops/csrc/includes/cpu_adam.h, Step_AVX), so that the
// bits are the same; the explicit fma and -ffp-contract=off leave the compiler no choice.
//
// DeepSpeed's vector loop leaves the elements behind its last whole vector to a scalar loop, in which
// the compiler fuses the other product of `m * beta1 + g * (1 - beta1)`. `tail` repeats that.
//
// Plain loops: g++ vectorises them for whatever the machine has, with equal results on every width.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

struct Scalars {
    float scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float bias_correction2, eps, decay, step_size;
};

enum Dtype : int { kNone = -1, kFloat = 0, kBFloat16 = 1, kHalf = 2 };

struct Float {
    using storage = float;
    static inline float load(float x) { return x; }
    static inline float store(float x) { return x; }
};

struct BFloat16 {
    using storage = uint16_t;
    static inline float load(uint16_t x)
    {
        const uint32_t bits = uint32_t(x) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    // Round to nearest even; NaN stays NaN (quiet), as in c10::BFloat16.
    static inline uint16_t store(float x)
    {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0) : uint16_t(rounded);
    }
};

struct Half {
    using storage = _Float16;
    static inline float load(_Float16 x) { return float(x); }
    static inline _Float16 store(float x) { return _Float16(x); }
};

struct Nothing {
    using storage = char;
    static inline char store(float) { return 0; }
};

enum Decay { kNoDecay, kL2, kDecoupled };

template <class Grad, class Out, Decay decay, bool write, bool tail>
void update_range(float* __restrict p, float* __restrict m, float* __restrict v,
                  const typename Grad::storage* __restrict g, typename Out::storage* __restrict out,
                  int64_t begin, int64_t end, const Scalars s)
{
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
        float grad = Grad::load(g[i]) * s.scale;
        float param = p[i];
        if (decay == kL2) grad = __builtin_fmaf(param, s.decay, grad);
        const float square = grad * grad;
        const float momentum = tail ? __builtin_fmaf(m[i], s.beta1, grad * s.one_minus_beta1)
                                    : __builtin_fmaf(grad, s.one_minus_beta1, m[i] * s.beta1);
        const float variance = tail ? __builtin_fmaf(v[i], s.beta2, square * s.one_minus_beta2)
                                    : __builtin_fmaf(square, s.one_minus_beta2, v[i] * s.beta2);
        const float denominator = __builtin_fmaf(__builtin_sqrtf(variance), s.bias_correction2, s.eps);
        if (decay == kDecoupled) param = __builtin_fmaf(param, s.decay, param);
        param = __builtin_fmaf(momentum / denominator, s.step_size, param);
        p[i] = param;
        m[i] = momentum;
        v[i] = variance;
        if (write) out[i] = Out::store(param);
    }
}

#if defined(__SSE2__)
// Writes `bytes` (a multiple of 64) past the caches: the parameters are not read again before they
// would leave them, and a plain store first reads the line it overwrites.
inline void stream_out(void* to, const void* from, int64_t bytes)
{
#if defined(__AVX512F__)
    for (int64_t k = 0; k < bytes / 64; ++k)
        _mm512_stream_si512(static_cast<__m512i*>(to) + k,
                            _mm512_load_si512(static_cast<const __m512i*>(from) + k));
#else
    for (int64_t k = 0; k < bytes / 16; ++k)
        _mm_stream_si128(static_cast<__m128i*>(to) + k,
                         _mm_load_si128(static_cast<const __m128i*>(from) + k));
#endif
}

template <class Grad, class Out, Decay decay>
void update_streaming(float* p, float* m, float* v, const typename Grad::storage* g,
                      typename Out::storage* out, int64_t begin, int64_t end, const Scalars& s)
{
    using T = typename Out::storage;
    constexpr int64_t kBlock = 256;
    alignas(64) T block[kBlock];
    int64_t i = begin;
    while (i < end && reinterpret_cast<uintptr_t>(out + i) % 64 != 0) ++i;
    update_range<Grad, Out, decay, true, false>(p, m, v, g, out, begin, i, s);
    for (; i + kBlock <= end; i += kBlock) {
        update_range<Grad, Out, decay, true, false>(p + i, m + i, v + i, g + i, block, 0, kBlock, s);
        stream_out(out + i, block, kBlock * int64_t(sizeof(T)));
    }
    update_range<Grad, Out, decay, true, false>(p, m, v, g, out, i, end, s);
    _mm_sfence();
}
#endif

// One thread's share of the vector part.
template <class Grad, class Out, Decay decay, bool write>
void update_share(float* p, float* m, float* v, const typename Grad::storage* g,
                  typename Out::storage* out, int64_t begin, int64_t end, const Scalars& s)
{
#if defined(__SSE2__)
    if constexpr (write) {
        // A small subgroup's parameters may still be in the caches when they are read.
        if (end - begin >= (int64_t(1) << 20)) {
            update_streaming<Grad, Out, decay>(p, m, v, g, out, begin, end, s);
            return;
        }
    }
#endif
    update_range<Grad, Out, decay, write, false>(p, m, v, g, out, begin, end, s);
}

template <class Grad, class Out, Decay decay, bool write>
void update(float* p, float* m, float* v, const void* g, void* out, int64_t n, const Scalars& s,
            int64_t tail, int threads)
{
    const auto* grad = static_cast<const typename Grad::storage*>(g);
    auto* wire = static_cast<typename Out::storage*>(out);
    update_range<Grad, Out, decay, write, true>(p, m, v, grad, wire, n - tail, n, s);
    n -= tail;
    if (threads <= 1 || n < (1 << 15)) {
        update_share<Grad, Out, decay, write>(p, m, v, grad, wire, 0, n, s);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        // Borders on multiples of 64 elements: no two threads share a cache line.
        const int64_t blocks = (n + 63) / 64;
        const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
        const int64_t begin = blocks * rank / team * 64;
        int64_t end = blocks * (rank + 1) / team * 64;
        if (end > n) end = n;
        if (begin < end) update_share<Grad, Out, decay, write>(p, m, v, grad, wire, begin, end, s);
    }
}

template <class Grad, class Out, bool write>
int with_decay(float* p, float* m, float* v, const void* g, void* out, int64_t n, const Scalars& s,
               int decay, int64_t tail, int threads)
{
    switch (decay) {
        case kNoDecay: update<Grad, Out, kNoDecay, write>(p, m, v, g, out, n, s, tail, threads); return 0;
        case kL2: update<Grad, Out, kL2, write>(p, m, v, g, out, n, s, tail, threads); return 0;
        case kDecoupled: update<Grad, Out, kDecoupled, write>(p, m, v, g, out, n, s, tail, threads); return 0;
    }
    return 2;
}

template <class Grad>
int with_out(float* p, float* m, float* v, const void* g, void* out, int out_dtype, int64_t n,
             const Scalars& s, int decay, int64_t tail, int threads)
{
    switch (out_dtype) {
        case kNone: return with_decay<Grad, Nothing, false>(p, m, v, g, out, n, s, decay, tail, threads);
        case kFloat: return with_decay<Grad, Float, true>(p, m, v, g, out, n, s, decay, tail, threads);
        case kBFloat16: return with_decay<Grad, BFloat16, true>(p, m, v, g, out, n, s, decay, tail, threads);
        case kHalf: return with_decay<Grad, Half, true>(p, m, v, g, out, n, s, decay, tail, threads);
    }
    return 1;
}

template <class T, int lanes>
double norm(const typename T::storage* g, int64_t n)
{
    double sums[lanes] = {};
    const int64_t vectors = n - n % lanes;
    for (int64_t i = 0; i < vectors; i += lanes)
        for (int k = 0; k < lanes; ++k) {
            const double x = T::load(g[i + k]);
            sums[k] += x * x;
        }
    double total = sums[0];
    for (int k = 1; k < lanes; ++k) total += sums[k];
    for (int64_t i = vectors; i < n; ++i) {
        const double x = T::load(g[i]);
        total += x * x;
    }
    return std::sqrt(total);
}

template <int lanes>
double norm_of(const void* g, int dtype, int64_t n)
{
    switch (dtype) {
        case kFloat: return norm<Float, lanes>(static_cast<const float*>(g), n);
        case kBFloat16: return norm<BFloat16, lanes>(static_cast<const uint16_t*>(g), n);
        case kHalf: return norm<Half, lanes>(static_cast<const _Float16*>(g), n);
    }
    return -1.0;
}

}  // namespace

extern "C" {

// Returns 0, or 1 for an unknown dtype, 2 for an unknown decay mode. `scalars` are the nine floats
// of Scalars in order; the last `tail` elements are updated as DeepSpeed's scalar loop does.
int ebbtide_host_adam(float* p, float* m, float* v, const void* g, int grad_dtype, void* out,
                      int out_dtype, int64_t n, const float* scalars, int decay, int64_t tail,
                      int threads)
{
    Scalars s;
    std::memcpy(&s, scalars, sizeof(s));
    switch (grad_dtype) {
        case kFloat: return with_out<Float>(p, m, v, g, out, out_dtype, n, s, decay, tail, threads);
        case kBFloat16: return with_out<BFloat16>(p, m, v, g, out, out_dtype, n, s, decay, tail, threads);
        case kHalf: return with_out<Half>(p, m, v, g, out, out_dtype, n, s, decay, tail, threads);
    }
    return 1;
}

// 2-norm in float64 without a float64 copy. Torch adds the squares up in as many lanes as its vectors
// have, then the lanes, then the rest; squares of fp32 values are exact in float64, so that with the
// same order the result has torch's bits (ATen/native/cpu/ReduceOpsKernel.cpp, norm_two_reduce_step).
// Returns a negative number for an unknown dtype or number of lanes.
double ebbtide_norm(const void* g, int dtype, int64_t n, int lanes)
{
    if (lanes == 8) return norm_of<8>(g, dtype, n);
    if (lanes == 4) return norm_of<4>(g, dtype, n);
    if (lanes == 2) return norm_of<2>(g, dtype, n);
    return -1.0;
}

// a[i] = b[i] + s * c[i], the STREAM triad: the yardstick for the update's share of DRAM bandwidth.
void ebbtide_triad(float* a, const float* b, const float* c, float s, int64_t n, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}

// A copy that several threads share, for emulated links and copy on update.
void ebbtide_copy(char* to, const char* from, int64_t bytes, int threads)
{
#pragma omp parallel num_threads(threads)
    {
        const int64_t blocks = (bytes + 4095) / 4096;
        const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
        const int64_t begin = blocks * rank / team * 4096;
        int64_t end = blocks * (rank + 1) / team * 4096;
        if (end > bytes) end = bytes;
        if (begin < end) std::memcpy(to + begin, from + begin, size_t(end - begin));
    }
}
}
