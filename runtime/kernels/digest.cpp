// A digest of a tensor: a few numbers. Digests of the parts of a tensor, on any rank, add up to that
// of the whole tensor.
//
// hash: the sum of (odd 64-bit key of the position) * (bits of the element), modulo 2^64. One changed
// bit always changes it. sketch: LANES sums of the elements with random signs. The sum of the squared
// differences of two sketches estimates the squared distance of two tensors.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TABLE = 1024, LANES = 16;

struct Digest {
    uint64_t hash;       // of all bits of the elements
    int64_t not_finite;  // number of infinities and NaNs, which count as 0 below
    double squares;
    double sketch[LANES];
};

inline uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

struct Keys {
    uint64_t key[TABLE];
    float sign[TABLE];
    Keys() {
        for (int64_t j = 0; j < TABLE; ++j) {
            key[j] = mixed(uint64_t(j)) | 1;
            sign[j] = key[j] >> 63 ? -1.0f : 1.0f;
        }
    }
};

struct Float {
    using word = uint32_t;
    static inline float value(uint32_t w) {
        float x;
        std::memcpy(&x, &w, 4);
        return x;
    }
};
struct Brain {
    using word = uint16_t;
    static inline float value(uint16_t w) { return Float::value(uint32_t(w) << 16); }
};
struct Half {
    using word = uint16_t;
    static inline float value(uint16_t w) {
        _Float16 x;
        std::memcpy(&x, &w, 2);
        return float(x);
    }
};

// Digest of the elements at the positions from .. from + n of the tensor, all in one row of the table.
template <typename Type>
void row(const typename Type::word* w, int64_t n, int64_t from, Digest& out) {
    static const Keys keys;
    const int64_t first = from % TABLE;
    const uint64_t outer = mixed(~uint64_t(from / TABLE)) | 1;
    const float flip = outer >> 63 ? -1.0f : 1.0f;
    uint64_t hash[LANES] = {};
    uint32_t bad[LANES] = {};
    double squares[LANES] = {}, sketch[LANES] = {};
    const auto one = [&](int64_t lane, int64_t i) {
        const int64_t j = first + i;
        float x = Type::value(w[i]);
        const uint32_t wrong = !(std::fabs(x) <= 3.4028234663852886e38f);
        hash[lane] += keys.key[j] * uint64_t(w[i]);
        bad[lane] += wrong;
        x = wrong ? 0.0f : x;
        const double wide = x;
        squares[lane] += wide * wide;
        sketch[lane] += double(keys.sign[j]) * wide;
    };
    int64_t i = 0;
    for (; i < n && (first + i) % LANES; ++i) one((first + i) % LANES, i);
    for (; i + LANES <= n; i += LANES)
        for (int64_t lane = 0; lane < LANES; ++lane) one(lane, i + lane);
    for (; i < n; ++i) one((first + i) % LANES, i);
    uint64_t sum = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) {
        sum += hash[lane];
        out.not_finite += bad[lane];
        out.squares += squares[lane];
        out.sketch[lane] += double(flip) * sketch[lane];
    }
    out.hash += outer * sum;
}

void add(const Digest& part, Digest& out) {
    out.hash += part.hash;
    out.not_finite += part.not_finite;
    out.squares += part.squares;
    for (int64_t lane = 0; lane < LANES; ++lane) out.sketch[lane] += part.sketch[lane];
}

template <typename Type>
void piece(const void* data, int64_t n, int64_t start, int threads, Digest& out) {
    const auto* w = static_cast<const typename Type::word*>(data);
    const int64_t begin = start / TABLE, end = (start + n + TABLE - 1) / TABLE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Digest mine{};
#pragma omp for schedule(static)
        for (int64_t block = begin; block < end; ++block) {
            const int64_t low = block == begin ? start : block * TABLE;
            const int64_t high = (block + 1) * TABLE < start + n ? (block + 1) * TABLE : start + n;
            row<Type>(w + (low - start), high - low, low, mine);
        }
#pragma omp critical
        add(mine, out);
    }
}

}  // namespace

// data: n elements of kind 0 (fp32), 1 (bf16) or 2 (fp16), from position `start` of their tensor.
// Returns 0, or 1 for an unknown kind.
extern "C" int ebbtide_digest(const void* data, int kind, int64_t n, int64_t start, int threads, Digest* out) {
    *out = Digest{};
    if (n <= 0) return 0;
    if (kind == 0) piece<Float>(data, n, start, threads, *out);
    else if (kind == 1) piece<Brain>(data, n, start, threads, *out);
    else if (kind == 2) piece<Half>(data, n, start, threads, *out);
    else return 1;
    return 0;
}
