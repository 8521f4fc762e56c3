/* SPDX-License-Identifier: Apache-2.0 */
/* The copy kernels, one source: NVRTC compiles it for the device, C reads the structs, tests run it as host
 * code. Each includer defines three macros, which select sections. kernels.c also includes it as text, so it
 * has no directives; kernels.h has SPAR_KERNEL_THREADS and SPAR_KERNEL_UNITS.
 *
 * A kernel copies parts: bytes low to high of one block each, in packed order, which is cut into tiles. A
 * grid of any size copies all tiles: each CTA one after another, so that a small grid leaves SMs to others.
 * Each thread copies several units of a tile, THREADS apart, and loads all of them before it stores the
 * first: 4 x 16 bytes in flight.
 *
 * Divisions by multiplication and shift turn a byte's offset in packed order into its addresses. All that a
 * kernel reads besides the bytes is in its parameters: there is nothing to upload, nor to free.
 *
 * With `sync` a launch is part of a round between ranks: rounds.cu, which has the body of all kernels. */

SPAR_SHARED(
/* Of the parameters, which are below 4 KB, the most that every device takes. */
enum {
    SPAR_KERNEL_PARTS = 65,
    SPAR_KERNEL_LOOPS = 56,
    SPAR_KERNEL_RANKS = 64, /* of a round */
    SPAR_KERNEL_TENSORS = 16, /* of a direct call */
    SPAR_KERNEL_OFFERS = 1,  /* modes of a launch of a round: it makes offers, and waits for the peers'; */
    SPAR_KERNEL_SIGNALS = 2, /* its last CTA signals the peers when `sent` tiles have been copied; */
    SPAR_KERNEL_WAITS = 4,   /* then it waits for their signals. A launch that waits has one CTA */
    SPAR_KERNEL_PEER_SLOT = 1, /* which side of a part lies in a slot: `to`, */
    SPAR_KERNEL_OWN_SLOT = 2,  /* or `from`; */
    SPAR_KERNEL_PEER_OUTPUT = 3, /* `to` is in a peer's output: see SPAR_KERNEL_TO */
    SPAR_KERNEL_BAD_OFFER = 256 /* and the rank that made it: written to `stop` */
};

/* n / number, for n below 2^31: (high 32 bits of (n * magic) + n) >> shift. */
typedef struct {
    unsigned number, magic, shift;
} spar_divisor;

typedef struct {
    long long src, dst; /* strides in bytes */
    spar_divisor extent; /* unused in a block's outermost loop */
    unsigned unused;
} spar_kernel_loop;

/* Fewer than 2^31 bytes of one block. */
typedef struct {
    const char *from; /* the block's first byte */
    char *to;
    unsigned low, high; /* in the block's packed order */
    unsigned tile; /* index of its first tile */
    short loop; /* its loops, outermost first; the last one runs over single bytes */
    unsigned char loops, slot;
} spar_kernel_part;

/* In device memory: what a rank's rounds need, one round after another. */
typedef struct {
    unsigned rounds; /* that have ended: all peers have signalled them */
    unsigned failed; /* a wait ended early: no round follows */
    unsigned ctas; /* of a launch, those that have ended; 0 when all have */
    unsigned offered; /* for how many direct calls offers were made, and have come */
    unsigned world, rank;
    unsigned long long half; /* from a slot's first half to its second one, in bytes */
    unsigned *stop; /* in host memory; not 0: waits end. A wait that is too long writes 1 + the peer's rank */
    const unsigned *mine; /* [2][RANKS] rounds that each peer has signalled; calls for which it offered */
    unsigned *theirs[SPAR_KERNEL_RANKS]; /* where each peer waits for this rank; the second one at RANKS */
    const unsigned *places; /* [world][TENSORS] each peer's offer: from its slot's first half, in 16 bytes */
    unsigned *offers[SPAR_KERNEL_RANKS]; /* where each peer reads that of this rank */
    char *slots[SPAR_KERNEL_RANKS]; /* the first half of each */
} spar_kernel_sync;

/* A kernel's only parameter. */
typedef struct {
    double factor;
    int divide;
    int parts;
    unsigned tiles; /* 0: nothing to copy */
    unsigned sent; /* how many of them are copied before the signal; the others are copied behind the wait */
    unsigned lanes; /* runs of tiles, one for each span, that are copied side by side */
    unsigned short mode, tensors;
    spar_kernel_sync *sync; /* 0: no round */
    unsigned long long limit_ns; /* of a wait; 0: none */
    unsigned *mark; /* in host memory: receives the number of the call that ends with this launch; 0: none */
    unsigned number;
    unsigned rounds; /* that it signals, and ends */
    unsigned offer[SPAR_KERNEL_TENSORS]; /* places */
    unsigned last[SPAR_KERNEL_TENSORS]; /* the last place that a peer may offer */
    spar_kernel_part part[SPAR_KERNEL_PARTS];
    spar_kernel_loop loop[SPAR_KERNEL_LOOPS];
} spar_kernel_copy;
)

SPAR_PTX(
/* Memory of a slot, whose address is not a parameter. */
template <class WORD> __device__ __forceinline__ WORD *reach(WORD *address)
{
    return address;
}

__device__ __forceinline__ float from_f16(unsigned short bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short to_f16(float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
)

SPAR_DEVICE(
template <int WIDTH> struct vector;
template <> struct vector<1> { typedef unsigned char type; };
template <> struct vector<2> { typedef unsigned short type; };
template <> struct vector<4> { typedef unsigned int type; };
template <> struct vector<8> { typedef uint2 type; };
template <> struct vector<16> { typedef uint4 type; };

/* Factors: an item's type, and how one is scaled. Bitwise equal to csrc/devices/cpu/scale.c. */

struct as_is {
    typedef unsigned char item;
    __device__ __forceinline__ as_is(const spar_kernel_copy &) {}
    __device__ __forceinline__ item operator()(item x) const { return x; }
};

template <class WIDE> struct real {
    typedef WIDE item;
    WIDE by;
    bool divide;
    __device__ __forceinline__ real(const spar_kernel_copy &c) : by(WIDE(c.factor)), divide(c.divide) {}
    __device__ __forceinline__ WIDE operator()(WIDE x) const { return divide ? x / by : x * by; }
};

typedef real<float> f32;
typedef real<double> f64;

struct f16 {
    typedef unsigned short item;
    f32 wide;
    __device__ __forceinline__ f16(const spar_kernel_copy &c) : wide(c) {}
    __device__ __forceinline__ item operator()(item x) const { return to_f16(wide(from_f16(x))); }
};

struct bf16 {
    typedef unsigned short item;
    f32 wide;
    __device__ __forceinline__ bf16(const spar_kernel_copy &c) : wide(c) {}
    __device__ __forceinline__ item operator()(item x) const
    {
        unsigned bits = __float_as_uint(wide(__uint_as_float(unsigned(x) << 16)));
        if ((bits & 0x7fffffff) > 0x7f800000)
            return 0x7fc0;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

/* Includes the terms of the factor's zero imaginary part. A division multiplies by the reciprocal. */
template <class REAL> struct complex {
    struct item {
        REAL re, im;
    };
    REAL by, inverse, ratio;
    bool divide;
    __device__ __forceinline__ complex(const spar_kernel_copy &c)
        : by(REAL(c.factor)), inverse(1 / by), ratio(0 / by), divide(c.divide)
    {
    }
    __device__ __forceinline__ item operator()(item x) const
    {
        const REAL zero = 0;
        item y;
        y.re = divide ? (x.re + x.im * ratio) * inverse : x.re * by - x.im * zero;
        y.im = divide ? (x.im - x.re * ratio) * inverse : x.re * zero + x.im * by;
        return y;
    }
};

typedef complex<float> c64;
typedef complex<double> c128;

__device__ __forceinline__ unsigned divided(unsigned n, const spar_divisor &by)
{
    return (__umulhi(n, by.magic) + n) >> by.shift;
}

__device__ __forceinline__ int part_of(const spar_kernel_copy &c, unsigned tile)
{
    int low = 0, high = c.parts;
    _Pragma("unroll 1")
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (c.part[middle].tile <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where a part is copied to, at `shift` in a slot, or where the peer wants it. */
__device__ __forceinline__ char *target_of(const spar_kernel_copy &c, const spar_kernel_part &part,
                                           unsigned long long shift)
{
    if (part.slot != SPAR_KERNEL_PEER_OUTPUT)
        return part.to + (part.slot == SPAR_KERNEL_PEER_SLOT ? shift : 0);
    const unsigned long long to = (unsigned long long)part.to;
    const unsigned peer = unsigned(to >> 58), tensor = unsigned(to >> 54) % SPAR_KERNEL_TENSORS;
    const unsigned place = reach(c.sync->places)[peer * SPAR_KERNEL_TENSORS + tensor];
    return reach(c.sync->slots[peer]) + 16ull * place + (to & ((1ull << 54) - 1));
}

/* Where this round writes in slots, and where this rank reads in its own what the round before wrote. */
struct halves {
    unsigned long long now, before;
};

/* Copies up to SPAR_KERNEL_UNITS units of one part, STEP bytes apart, from byte x of the block on. Loads
 * all of them before it stores the first. */
template <int WIDTH, class SCALE>
__device__ __forceinline__ void move(const spar_kernel_copy &c, const spar_kernel_part &part,
                                     const SCALE &scale, unsigned x, const halves &half)
{
    typedef typename vector<WIDTH>::type word;
    typedef typename SCALE::item item;
    constexpr int COUNT = SPAR_KERNEL_UNITS, STEP = SPAR_KERNEL_THREADS * WIDTH;
    constexpr int ITEMS = WIDTH / int(sizeof(item));
    union unit {
        word whole;
        item items[ITEMS];
    };
    const int left = int((part.high - x + STEP - 1) / STEP);
    unsigned turn[COUNT];
    long long src[COUNT], dst[COUNT];
    unit data[COUNT];
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        turn[u] = x + u * STEP;
        src[u] = dst[u] = 0;
    }
    _Pragma("unroll 1")
    for (int k = part.loop + part.loops - 1; k > part.loop; k--) {
        const spar_kernel_loop loop = c.loop[k];
        _Pragma("unroll")
        for (int u = 0; u < COUNT; u++) {
            const unsigned rest = divided(turn[u], loop.extent);
            const unsigned index = turn[u] - rest * loop.extent.number;
            src[u] += index * loop.src;
            dst[u] += index * loop.dst;
            turn[u] = rest;
        }
    }
    const spar_kernel_loop outer = c.loop[part.loop];
    const char *from = part.from + (part.slot == SPAR_KERNEL_OWN_SLOT ? half.before : 0);
    char *to = target_of(c, part, half.now);
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        if (u < left)
            data[u].whole = *(const word *)(from + src[u] + turn[u] * outer.src);
    }
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        if (u >= left)
            break;
        _Pragma("unroll")
        for (int i = 0; i < ITEMS; i++)
            data[u].items[i] = scale(data[u].items[i]);
        *(word *)(to + dst[u] + turn[u] * outer.dst) = data[u].whole;
    }
}

__device__ __forceinline__ halves halves_of(const spar_kernel_copy &c)
{
    const unsigned long long second = c.sync ? c.sync->half : 0;
    const unsigned long long now = c.sync && c.sync->rounds % 2 ? second : 0;
    return {now, second - now};
}

/* Copies tiles low to high. The grid takes them from all lanes by turns, so that it writes to all peers at
 * once. */
template <int WIDTH, class SCALE>
__device__ __forceinline__ void copy(const spar_kernel_copy &c, unsigned low, unsigned high)
{
    constexpr unsigned TILE = SPAR_KERNEL_UNITS * SPAR_KERNEL_THREADS * WIDTH;
    const SCALE scale(c);
    const halves half = halves_of(c);
    const unsigned lane = (high - low + c.lanes - 1) / c.lanes;
    _Pragma("unroll 1")
    for (unsigned turn = blockIdx.x; turn < lane * c.lanes; turn += gridDim.x) {
        const unsigned tile = low + turn % c.lanes * lane + turn / c.lanes;
        if (tile >= high)
            continue;
        const spar_kernel_part &part = c.part[part_of(c, tile)];
        const unsigned x = part.low + (tile - part.tile) * TILE + threadIdx.x * WIDTH;
        if (x < part.high)
            move<WIDTH>(c, part, scale, x, half);
    }
}
)
