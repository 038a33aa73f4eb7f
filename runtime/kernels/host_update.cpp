// One step of an optimizer over a flat subgroup, in one pass over memory.
//
// Reads the gradient in its wire precision, folds unscale and clip into one factor, updates the fp32
// master and moments in place and writes the wire-precision parameter. Per element the fp32 operations
// and their order are those of DeepSpeed's CPU optimizers (ops/csrc/includes/cpu_{adam,lion,adagrad}.h,
// Step_AVX), so that the bits are the same; the explicit fma and -ffp-contract=off leave the compiler
// no choice. An optimizer is a struct: how many moments, which scalars, what happens to an element.
//
// DeepSpeed's vector loop leaves the elements behind its last whole vector to a scalar loop, in which
// the compiler fuses the other product of `m * beta1 + g * (1 - beta1)`. `tail` repeats that.
//
// Plain loops: g++ vectorises them for whatever the machine has, with equal results on every width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

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

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// a * x + b * y, each optimizer's average: the loops of DeepSpeed fuse one product each.
template <bool tail>
inline float average(float a, float x, float b, float y)
{
    return tail ? fma(x, a, y * b) : fma(y, b, x * a);
}

// `magnitude` with the sign that `x` has not; zeros have signs too.
inline float opposite(float magnitude, float x)
{
    uint32_t sign, bits;
    std::memcpy(&sign, &x, 4);
    std::memcpy(&bits, &magnitude, 4);
    bits |= ~sign & 0x80000000u;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
}

struct Adam {
    static constexpr int kMoments = 2;
    enum Variant { kNoDecay, kL2, kDecoupled, kVariants };
    struct Scalars {
        float scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
        float bias_correction2, eps, decay, step_size;
    };
    template <int variant, bool tail>
    static inline float update(float param, float grad, float& momentum, float& variance,
                               const Scalars& s)
    {
        if (variant == kL2) grad = fma(param, s.decay, grad);
        const float square = grad * grad;
        momentum = average<tail>(s.beta1, momentum, s.one_minus_beta1, grad);
        variance = average<tail>(s.beta2, variance, s.one_minus_beta2, square);
        const float denominator = fma(__builtin_sqrtf(variance), s.bias_correction2, s.eps);
        if (variant == kDecoupled) param = fma(param, s.decay, param);
        return fma(momentum / denominator, s.step_size, param);
    }
};

struct Lion {
    static constexpr int kMoments = 1;
    enum Variant { kNoDecay, kDecay, kVariants };
    struct Scalars {
        float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, after_decay, lr;
    };
    template <int variant, bool tail>
    static inline float update(float param, float grad, float& momentum, float&, const Scalars& s)
    {
        const float direction = average<tail>(s.beta1, momentum, s.one_minus_beta1, grad);
        // Through the bits: g++ turns -fma(a, b, c) into fma(-a, b, -c), whose zero has another sign.
        const float change = opposite(s.lr, direction);
        momentum = average<tail>(s.beta2, momentum, s.one_minus_beta2, grad);
        return variant == kDecay ? fma(param, s.after_decay, change) : param + change;
    }
};

struct Adagrad {
    static constexpr int kMoments = 1;
    enum Variant { kNoDecay, kL2, kVariants };
    struct Scalars {
        float scale, eps, decay, step_size;
    };
    template <int variant, bool tail>
    static inline float update(float param, float grad, float& sum, float&, const Scalars& s)
    {
        if (variant == kL2) grad = fma(param, s.decay, grad);
        sum = fma(grad, grad, sum);
        const float step = grad / (__builtin_sqrtf(sum) + s.eps);
        // The scalar loop stores the product as well, and so does not fuse it.
        return tail ? param + step * s.step_size : fma(step, s.step_size, param);
    }
};

// What is fixed while a range is updated. `v` is null where there is one moment. `from`: where the state
// is read, if not where it is written.
template <class Rule, class Grad, class Out>
struct Range {
    float *p, *m, *v;
    const typename Grad::storage* g;
    typename Out::storage* out;
    typename Rule::Scalars s;
    const float* const* from;

    void bring(int64_t begin, int64_t end) const
    {
        float* const to[] = {p, m, v};
        for (int k = 0; k <= Rule::kMoments; ++k)
            std::memcpy(to[k] + begin, from[k] + begin, size_t(end - begin) * sizeof(float));
    }
};

template <class Rule, class Grad, class Out, int variant, bool write, bool tail>
void update_range(float* __restrict p, float* __restrict m, float* __restrict v,
                  const typename Grad::storage* __restrict g, typename Out::storage* __restrict out,
                  int64_t begin, int64_t end, const typename Rule::Scalars s)
{
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
        float first = m[i], second = 0.0f;
        if constexpr (Rule::kMoments > 1) second = v[i];
        const float grad = Grad::load(g[i]) * s.scale;
        const float param = Rule::template update<variant, tail>(p[i], grad, first, second, s);
        p[i] = param;
        m[i] = first;
        if constexpr (Rule::kMoments > 1) v[i] = second;
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

template <class Rule, class Grad, class Out, int variant>
void update_streaming(const Range<Rule, Grad, Out>& r, int64_t begin, int64_t end)
{
    using T = typename Out::storage;
    constexpr int64_t kBlock = 256;
    constexpr auto run = update_range<Rule, Grad, Out, variant, true, false>;
    alignas(64) T block[kBlock];
    int64_t i = begin;
    while (i < end && reinterpret_cast<uintptr_t>(r.out + i) % 64 != 0) ++i;
    run(r.p, r.m, r.v, r.g, r.out, begin, i, r.s);
    for (; i + kBlock <= end; i += kBlock) {
        float* v = Rule::kMoments > 1 ? r.v + i : nullptr;
        run(r.p + i, r.m + i, v, r.g + i, block, 0, kBlock, r.s);
        stream_out(r.out + i, block, kBlock * int64_t(sizeof(T)));
    }
    run(r.p, r.m, r.v, r.g, r.out, i, end, r.s);
    _mm_sfence();
}
#endif

// Elements that a thread takes at a time: 16 bytes each of state, gradient and parameter make 1 MiB,
// long enough for the prefetchers. Borders on multiples of 64 elements: no two threads share a cache line.
constexpr int64_t kChunk = int64_t(1) << 16;
constexpr int64_t kBrought = int64_t(1) << 13;  // that are brought and updated at once: 96 KiB of state

// Cuts [0, n) into chunks that the team takes one after the other. Of equal shares, given out
// beforehand, the thread whose core the training thread is on would still have half of its own when the
// others are done.
template <class Body>
void in_chunks(int64_t n, int64_t unit, int64_t longest, int threads, const Body& body)
{
    if (threads <= 1) {
        body(int64_t(0), n);
        return;
    }
    // Short ranges too come in several chunks per thread.
    int64_t chunk = (n / (int64_t(threads) * 4) + unit - 1) / unit * unit;
    if (chunk > longest) chunk = longest;
    if (chunk < unit) chunk = unit;
    const int64_t chunks = (n + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t k = 0; k < chunks; ++k) {
        const int64_t begin = k * chunk;
        body(begin, begin + chunk < n ? begin + chunk : n);
    }
}

// Not inlined: of all these forms each is compiled once.
template <class Rule, class Grad, class Out, int variant, bool write>
__attribute__((noinline)) void update_chunk(const Range<Rule, Grad, Out>& r, bool streams,
                                            int64_t begin, int64_t end)
{
#if defined(__SSE2__)
    if constexpr (write) {
        if (streams) return update_streaming<Rule, Grad, Out, variant>(r, begin, end);
    }
#endif
    update_range<Rule, Grad, Out, variant, write, false>(r.p, r.m, r.v, r.g, r.out, begin, end, r.s);
}

template <class Rule, class Grad, class Out, int variant, bool write>
void update(const Range<Rule, Grad, Out>& r, int64_t n, int64_t tail, int threads)
{
    if (r.from) r.bring(n - tail, n);
    update_range<Rule, Grad, Out, variant, write, true>(r.p, r.m, r.v, r.g, r.out, n - tail, n, r.s);
    n -= tail;
    if (n < (1 << 15)) threads = 1;
    // A small subgroup's parameters may still be in the caches when they are read.
    const bool streams = n / std::max(threads, 1) >= (int64_t(1) << 20);
    in_chunks(n, 64, kChunk, threads, [&](int64_t begin, int64_t end) {
        if (!r.from) return update_chunk<Rule, Grad, Out, variant, write>(r, streams, begin, end);
        for (int64_t i = begin; i < end; i += kBrought) {  // in the caches when it is updated
            const int64_t last = std::min(i + kBrought, end);
            r.bring(i, last);
            update_chunk<Rule, Grad, Out, variant, write>(r, streams, i, last);
        }
    });
}

// What the caller of the library handed in; dtypes and variant are looked up one after the other.
struct Call {
    float *p, *m, *v;
    const float* const* from;
    const void* g;
    int grad_dtype;
    void* out;
    int out_dtype;
    int64_t n;
    const float* scalars;
    int variant;
    int64_t tail;
    int threads;
};

template <class Rule, class Grad, class Out, bool write, int variant = 0>
int with_variant(const Call& c)
{
    if constexpr (variant == Rule::kVariants) {
        return 2;
    } else {
        if (c.variant != variant) return with_variant<Rule, Grad, Out, write, variant + 1>(c);
        Range<Rule, Grad, Out> r{c.p, c.m, c.v, static_cast<const typename Grad::storage*>(c.g),
                                 static_cast<typename Out::storage*>(c.out), {}, c.from};
        std::memcpy(&r.s, c.scalars, sizeof(r.s));
        update<Rule, Grad, Out, variant, write>(r, c.n, c.tail, c.threads);
        return 0;
    }
}

template <class Rule, class Grad>
int with_out(const Call& c)
{
    switch (c.out_dtype) {
        case kNone: return with_variant<Rule, Grad, Nothing, false>(c);
        case kFloat: return with_variant<Rule, Grad, Float, true>(c);
        case kBFloat16: return with_variant<Rule, Grad, BFloat16, true>(c);
        case kHalf: return with_variant<Rule, Grad, Half, true>(c);
    }
    return 1;
}

template <class Rule>
int with_gradient(const Call& c)
{
    switch (c.grad_dtype) {
        case kFloat: return with_out<Rule, Float>(c);
        case kBFloat16: return with_out<Rule, BFloat16>(c);
        case kHalf: return with_out<Rule, Half>(c);
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

// Returns 0, or 1 for an unknown dtype, 2 for an unknown variant, 3 for an unknown rule. `scalars` are
// the floats of the rule's Scalars in order; the last `tail` elements are updated as DeepSpeed's scalar
// loop does. `m` and `v` are the rule's moments; `v` is not read where it has one. `from`: the old
// master and moments, where they are not to be overwritten; null: they are in `p`, `m` and `v`.
int ebbtide_update(const char* rule, float* p, float* m, float* v, const float* const* from,
                   const void* g, int grad_dtype, void* out, int out_dtype, int64_t n, const float* scalars, int variant,
                   int64_t tail, int threads)
{
    const Call c{p, m, v, from, g, grad_dtype, out, out_dtype, n, scalars, variant, tail, threads};
    if (std::strcmp(rule, "adam") == 0) return with_gradient<Adam>(c);
    if (std::strcmp(rule, "lion") == 0) return with_gradient<Lion>(c);
    if (std::strcmp(rule, "adagrad") == 0) return with_gradient<Adagrad>(c);
    return 3;
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
    in_chunks(bytes, 4096, int64_t(1) << 20, threads, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, size_t(end - begin));
    });
}
}
