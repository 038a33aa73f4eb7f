// One step of an optimizer over a flat subgroup, in one pass over memory.
//
// Reads the gradient in its wire precision, combines unscaling and clipping into one factor, updates
// the fp32 master and moments in place, and writes the parameter in its wire precision. The fp32
// operations on an element and their order are those of DeepSpeed's CPU optimizers
// (ops/csrc/includes/cpu_{adam,lion,adagrad}.h, Step_AVX), so that the bits are the same. The explicit
// fma and -ffp-contract=off keep the compiler from changing this. Each optimizer is a struct: number
// of moments, scalars, and the update of an element.
//
// DeepSpeed's vector loop leaves the elements after its last whole vector to a scalar loop. There the
// compiler fuses the other product of `m * beta1 + g * (1 - beta1)`. `tail` does the same.
//
// The loops are plain: g++ vectorizes them for any machine, with equal results for every vector width.

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

inline uint32_t bits_of(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float with_bits(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct BFloat16 {
    using storage = uint16_t;
    static inline float load(uint16_t x)
    {
        return with_bits(uint32_t(x) << 16);
    }
    // Round to nearest even. A NaN stays a (quiet) NaN, as in c10::BFloat16.
    static inline uint16_t store(float x)
    {
        const uint32_t bits = bits_of(x);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0) : uint16_t(rounded);
    }
};

// fp16 in integer arithmetic, which g++ vectorizes. It converts _Float16 one element at a time.
struct Half {
    using storage = uint16_t;
    static inline float load(uint16_t x)
    {
        const uint32_t magnitude = x & 0x7fffu, shifted = magnitude << 13;
        const uint32_t rebased = shifted + (magnitude < 0x7c00u ? 0x38000000u : 0x70000000u);
        const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-24f);
        return with_bits((magnitude < 0x400u ? subnormal : rebased) | uint32_t(x & 0x8000u) << 16);
    }
    // Round to nearest even. A NaN stays a (quiet) NaN with its leading bits, as on x86.
    static inline uint16_t store(float x)
    {
        const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
        const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // The last bit of 0.5f is worth as much as that of a subnormal fp16 number, so the sum is rounded there.
        const uint32_t subnormal = bits_of(with_bits(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
        result = magnitude < 0x47800000u ? result : 0x7c00u;  // 2^16 or more
        result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
        return uint16_t(result | (bits >> 16 & 0x8000u));
    }
};

struct Nothing {
    using storage = char;
    static inline char store(float) { return 0; }
};

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// a * x + b * y, the average in each optimizer. DeepSpeed's two loops fuse one of the products each.
template <bool tail>
inline float average(float a, float x, float b, float y)
{
    return tail ? fma(x, a, y * b) : fma(y, b, x * a);
}

// Returns `magnitude` with the sign opposite to that of `x`. Zeros have signs too.
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
        // By setting the sign bit, because g++ turns -fma(a, b, c) into fma(-a, b, -c), which has
        // another sign for zero.
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
        // DeepSpeed's scalar loop also stores the product, so it does not fuse it.
        return tail ? param + step * s.step_size : fma(step, s.step_size, param);
    }
};

// Master and moments from one element on. `v` is null for an optimizer with one moment.
struct State {
    float *p, *m, *v;
    State at(int64_t i) const { return {p + i, m + i, v ? v + i : v}; }
};

// Memory that an update reads and writes. `from` and `to` are the same memory, or do not overlap.
template <class Rule, class Grad, class Out>
struct Range {
    State from, to;
    const typename Grad::storage* g;
    typename Out::storage* out;
    typename Rule::Scalars s;
    Range at(int64_t i) const { return {from.at(i), to.at(i), g + i, out ? out + i : out, s}; }
};

template <class Rule, class Grad, class Out, int variant, bool write, bool tail>
void update_range(const Range<Rule, Grad, Out>& r, int64_t n)
{
    const float *p0 = r.from.p, *m0 = r.from.m, *v0 = r.from.v;
    float *p = r.to.p, *m = r.to.m, *v = r.to.v;
    const typename Grad::storage* g = r.g;
    typename Out::storage* out = r.out;
    const typename Rule::Scalars s = r.s;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        float first = m0[i], second = 0.0f;
        if constexpr (Rule::kMoments > 1) second = v0[i];
        const float grad = Grad::load(g[i]) * s.scale;
        const float param = Rule::template update<variant, tail>(p0[i], grad, first, second, s);
        p[i] = param;
        m[i] = first;
        if constexpr (Rule::kMoments > 1) v[i] = second;
        if (write) out[i] = Out::store(param);
    }
}

#if defined(__SSE2__)
// Writes `bytes` (a multiple of 64) with non-temporal stores if `to` is aligned to a cache line. The
// written values would leave the caches before they are read again, and a plain store would first read
// the line.
inline void stream_out(void* to, const void* from, int64_t bytes)
{
    if (reinterpret_cast<uintptr_t>(to) % 64 != 0) {
        std::memcpy(to, from, size_t(bytes));
        return;
    }
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

// Number of elements between two series of non-temporal stores. Out of place, four streams alternate.
// Compared with an update in place, such an update takes 1.2 times as long with up to 256 elements,
// 1.7 times with 1,024 elements, and 1.6 times with plain stores (40 M parameters, Zen 5).
constexpr int64_t kBlock = 64;

template <class Rule, class Grad, class Out, int variant>
void update_streaming(const Range<Rule, Grad, Out>& r, int64_t n)
{
    using T = typename Out::storage;
    constexpr auto run = update_range<Rule, Grad, Out, variant, true, false>;
    alignas(64) T out[kBlock];
    alignas(64) float state[3][kBlock];
    const State block{state[0], state[1], state[2]};
    const bool apart = r.from.p != r.to.p;
    int64_t i = 0;
    while (i < n && reinterpret_cast<uintptr_t>(r.out + i) % 64 != 0) ++i;
    run(r, i);
    for (; i + kBlock <= n; i += kBlock) {
        const Range<Rule, Grad, Out> next = r.at(i);
        run({next.from, apart ? block : next.to, next.g, out, r.s}, kBlock);
        if (apart) {
            stream_out(next.to.p, state[0], sizeof(state[0]));
            stream_out(next.to.m, state[1], sizeof(state[1]));
            if (Rule::kMoments > 1) stream_out(next.to.v, state[2], sizeof(state[2]));
        }
        stream_out(next.out, out, sizeof(out));
    }
    run(r.at(i), n - i);
    _mm_sfence();
}
#endif

// Number of elements that a thread takes at a time. With 16 bytes of state, gradient and parameter per
// element this is 1 MiB, long enough for the prefetchers. Chunks begin at multiples of 64 elements, so
// that no two threads share a cache line.
constexpr int64_t kChunk = int64_t(1) << 16;

// Divides [0, n) into chunks that the threads take one after the other. If each thread had a fixed,
// equal share, the thread on the core of the training thread would still have half of its share left
// when the others are done.
template <class Body>
void in_chunks(int64_t n, int64_t unit, int64_t longest, int threads, const Body& body)
{
    if (threads <= 1) {
        body(int64_t(0), n);
        return;
    }
    // Short ranges are divided too, into several chunks per thread.
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

// Not inlined, so that each combination of template arguments is compiled once.
template <class Rule, class Grad, class Out, int variant, bool write>
__attribute__((noinline)) void update_chunk(const Range<Rule, Grad, Out>& r, bool streams, int64_t n)
{
#if defined(__SSE2__)
    if constexpr (write) {
        if (streams) return update_streaming<Rule, Grad, Out, variant>(r, n);
    }
#endif
    update_range<Rule, Grad, Out, variant, write, false>(r, n);
}

template <class Rule, class Grad, class Out, int variant, bool write>
void update(const Range<Rule, Grad, Out>& r, int64_t n, int64_t tail, int threads)
{
    n -= tail;
    update_range<Rule, Grad, Out, variant, write, true>(r.at(n), tail);
    if (n < (1 << 15)) threads = 1;
    // The parameters of a small subgroup may be read while they are still in the caches.
    const bool streams = n / std::max(threads, 1) >= (int64_t(1) << 20);
    in_chunks(n, 64, kChunk, threads, [&](int64_t begin, int64_t end) {
        update_chunk<Rule, Grad, Out, variant, write>(r.at(begin), streams, end - begin);
    });
}

// The arguments of a call from outside. Dtypes and variant are resolved one after the other.
struct Call {
    State from, to;
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
        Range<Rule, Grad, Out> r{c.from, c.to, static_cast<const typename Grad::storage*>(c.g),
                                 static_cast<typename Out::storage*>(c.out), {}};
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
        case kHalf: return norm<Half, lanes>(static_cast<const uint16_t*>(g), n);
    }
    return -1.0;
}

}  // namespace

extern "C" {

// Returns 0, or 1 for an unknown dtype, 2 for an unknown variant, 3 for an unknown rule. `scalars` are
// the floats of the rule's Scalars, in their order. The last `tail` elements are updated as
// DeepSpeed's scalar loop updates them. `from` and `to` are the old and the new master and moments,
// which may be the same memory. A rule with one moment does not use the third pointer.
int ebbtide_update(const char* rule, float* const* from, float* const* to, const void* g,
                   int grad_dtype, void* out, int out_dtype, int64_t n, const float* scalars,
                   int variant, int64_t tail, int threads)
{
    const Call c{{from[0], from[1], from[2]}, {to[0], to[1], to[2]}, g, grad_dtype, out, out_dtype, n,
                 scalars, variant, tail, threads};
    if (std::strcmp(rule, "adam") == 0) return with_gradient<Adam>(c);
    if (std::strcmp(rule, "lion") == 0) return with_gradient<Lion>(c);
    if (std::strcmp(rule, "adagrad") == 0) return with_gradient<Adagrad>(c);
    return 3;
}

// 2-norm in float64 without a float64 copy. torch first adds up the squares in as many lanes as its
// vectors have, then adds the lanes, then the remaining elements. Squares of fp32 values are exact in
// float64, so the same order gives torch's bits (ATen/native/cpu/ReduceOpsKernel.cpp,
// norm_two_reduce_step). Returns a negative number for an unknown dtype or number of lanes.
double ebbtide_norm(const void* g, int dtype, int64_t n, int lanes)
{
    if (lanes == 8) return norm_of<8>(g, dtype, n);
    if (lanes == 4) return norm_of<4>(g, dtype, n);
    if (lanes == 2) return norm_of<2>(g, dtype, n);
    return -1.0;
}

// a[i] = b[i] + s * c[i], the STREAM triad, with which the update's share of DRAM bandwidth is
// measured.
void ebbtide_triad(float* a, const float* b, const float* c, float s, int64_t n, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}

// A copy by several threads, for emulated links and for state that is copied before an update.
void ebbtide_copy(char* to, const char* from, int64_t bytes, int threads)
{
    in_chunks(bytes, 4096, int64_t(1) << 20, threads, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, size_t(end - begin));
    });
}
}
