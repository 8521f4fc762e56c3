/* The copy kernels, one source: NVRTC compiles it for the device, C reads the structs, tests run it as host
 * code. Each includer defines three macros, which select sections. kernels.c also includes it as text, so it
 * has no directives.
 *
 * A kernel copies spans: bytes low to high of a list of blocks in packed order. A CTA copies a tile of one
 * span. Each thread copies several units, THREADS apart, and loads all of them before it stores the first: 4
 * x 16 bytes in flight.
 *
 * A byte's offset in packed order gives its address. A binary search finds the block, once per tile if the
 * tile lies in one block. Divisions by multiplication and shift give its position in the run and the
 * loops. */

SPAR_SHARED(
enum {
    SPAR_KERNEL_THREADS = 256, /* per CTA */
    SPAR_KERNEL_SPANS = 32, /* per launch, at most */
    SPAR_KERNEL_UNITS = 4, /* of WIDTH bytes, per thread */
    SPAR_KERNEL_TENSORS = 16, /* per launch, at most */
};

/* n / number, for n below 2^31: (high 32 bits of (n * magic) + n) >> shift. */
typedef struct {
    unsigned number, magic, shift;
} spar_divisor;

typedef struct {
    long long src, dst; /* strides in bytes */
    spar_divisor extent;
    unsigned unused;
} spar_kernel_loop;

/* Fewer than 2^31 bytes: `run` contiguous bytes, repeated over loops. */
typedef struct {
    long long at; /* offset in the packed order of its list */
    long long src, dst; /* offsets of its first byte in the tensors */
    spar_divisor run;
    unsigned bytes;
    int loops; /* index of the outermost loop */
    short ndim, tensor;
} spar_kernel_block;

typedef struct {
    long long low, high; /* in packed order */
    char *wire; /* address of byte `low`; unused if both sides are tensors */
    int first, count; /* the list's blocks */
    unsigned tile; /* index of its first CTA */
    unsigned unused;
} spar_kernel_span;

/* A kernel's only parameter. */
typedef struct {
    const spar_kernel_block *blocks;
    const spar_kernel_loop *loops;
    const char *from[SPAR_KERNEL_TENSORS]; /* from tensor `tensor` on */
    char *to[SPAR_KERNEL_TENSORS];
    double factor;
    int divide, tensor;
    short packs, unpacks; /* the wire replaces `to`, or `from` */
    int spans; /* 0: a no-op launch */
    spar_kernel_span span[SPAR_KERNEL_SPANS];
} spar_kernel_copy;
)

SPAR_PTX(
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

/* Returns the last of blocks low to high - 1 that begins at or before x. Block `low` must. */
__device__ __forceinline__ int block_of(const spar_kernel_block *blocks, int low, int high, long long x)
{
    _Pragma("unroll 1")
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (blocks[middle].at <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ int span_of(const spar_kernel_copy &c, unsigned tile)
{
    int low = 0, high = c.spans;
    _Pragma("unroll 1")
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (c.span[middle].tile <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Copies COUNT units of one block, STEP bytes apart, from byte x in packed order on. Loads all of them before
 * it stores the first. */
template <int WIDTH, int COUNT, class SCALE>
__device__ __forceinline__ void move(const spar_kernel_copy &c, const spar_kernel_span &span,
                                     const spar_kernel_block &block, const SCALE &scale, long long x)
{
    typedef typename vector<WIDTH>::type part;
    typedef typename SCALE::item item;
    constexpr int STEP = SPAR_KERNEL_THREADS * WIDTH, ITEMS = WIDTH / int(sizeof(item));
    union unit {
        part whole;
        item items[ITEMS];
    };
    const int left = span.high - x > COUNT * STEP ? COUNT : int((span.high - x + STEP - 1) / STEP);
    unsigned turn[COUNT];
    long long src[COUNT], dst[COUNT];
    unit data[COUNT];
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        const unsigned at = unsigned(x - block.at) + u * STEP;
        turn[u] = divided(at, block.run);
        src[u] = dst[u] = at - turn[u] * block.run.number;
    }
    _Pragma("unroll 1")
    for (int k = block.loops + block.ndim - 1; k >= block.loops; k--) {
        const spar_kernel_loop loop = c.loops[k];
        _Pragma("unroll")
        for (int u = 0; u < COUNT; u++) {
            const unsigned rest = divided(turn[u], loop.extent);
            const unsigned index = turn[u] - rest * loop.extent.number;
            src[u] += index * loop.src;
            dst[u] += index * loop.dst;
            turn[u] = rest;
        }
    }
    const char *from = c.unpacks ? span.wire + (x - span.low) : c.from[block.tensor - c.tensor] + block.src;
    char *to = c.packs ? span.wire + (x - span.low) : c.to[block.tensor - c.tensor] + block.dst;
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        if (u < left)
            data[u].whole = *(const part *)(from + (c.unpacks ? u * STEP : src[u]));
    }
    _Pragma("unroll")
    for (int u = 0; u < COUNT; u++) {
        if (u >= left)
            break;
        _Pragma("unroll")
        for (int i = 0; i < ITEMS; i++)
            data[u].items[i] = scale(data[u].items[i]);
        *(part *)(to + (c.packs ? u * STEP : dst[u])) = data[u].whole;
    }
}

template <int WIDTH, class SCALE> __device__ __forceinline__ void copy(const spar_kernel_copy &c)
{
    constexpr int STEP = SPAR_KERNEL_THREADS * WIDTH, TILE = SPAR_KERNEL_UNITS * STEP;
    if (c.spans == 0)
        return;
    const SCALE scale(c);
    const spar_kernel_span &span = c.span[span_of(c, blockIdx.x)];
    const long long tile = span.low + (long long)(blockIdx.x - span.tile) * TILE;
    const long long last = span.high - tile > TILE ? tile + TILE : span.high;
    const int end = span.first + span.count;
    int which = block_of(c.blocks, span.first, end, tile);
    spar_kernel_block block = c.blocks[which];
    long long x = tile + threadIdx.x * WIDTH;
    if (last - block.at <= block.bytes) {
        if (x < last)
            move<WIDTH, SPAR_KERNEL_UNITS>(c, span, block, scale, x);
        return;
    }
    _Pragma("unroll 1")
    for (; x < last; x += STEP) {
        if (x - block.at >= block.bytes) {
            which = block_of(c.blocks, which + 1, end, x);
            block = c.blocks[which];
        }
        move<WIDTH, 1>(c, span, block, scale, x);
    }
}
)
