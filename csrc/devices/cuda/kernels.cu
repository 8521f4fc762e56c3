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
 * A launch with `sync` is part of a round between ranks that write to each other's slots. In a round a rank
 * copies into the peers' slots, after which the last CTA signals each peer; then one CTA waits for every
 * peer's signal, which ends the round. What came is copied out of this rank's slot beside what the next
 * round sends, before its signal. A small call is one launch of one CTA; else waiting is a launch of its
 * own, so that CTAs that wait hold no SMs. The number of rounds is in device memory, so that a graph can be
 * replayed, and selects one of a slot's two halves. A rank begins a round when all peers have signalled the
 * one before, which they did after they had emptied what this round overwrites. So there is no signal for an
 * emptied slot, and sending waits for nothing.
 *
 * In a direct call the peers write to outputs, whose places each rank offers them at its begin: memory of
 * its slot that the stream no longer uses. One CTA then waits for the peers' offers, which wait for
 * nothing. Each place is compared with the last one from which on the tensor is in the slot. Ranks that
 * need not know when a part of a call has come make all its rounds at once. */

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
    unsigned ctas, unused; /* of a launch, those that have ended */
    unsigned world, rank;
    unsigned long long half; /* from a slot's first half to its second one, in bytes */
    unsigned *stop; /* in host memory; not 0: waits end. A wait that is too long writes 1 + the peer's rank */
    const unsigned *mine; /* [2][RANKS] how many rounds each peer has signalled; the one it has offered for */
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

__device__ __forceinline__ unsigned load_acquire(const unsigned *from)
{
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ unsigned load_relaxed(const unsigned *from)
{
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void pause()
{
    asm volatile("nanosleep.u32 40;");
}

__device__ __forceinline__ void store_release(unsigned *to, unsigned value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

/* Counts to `last`, then from 0 again; returns the count before. */
__device__ __forceinline__ unsigned count_to(unsigned *counter, unsigned last)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(counter), "r"(last) : "memory");
    return before;
}

__device__ __forceinline__ unsigned long long now_ns()
{
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
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

/* The parts of a launch of a round, for each thread of a CTA, with a barrier between each two. */

__device__ __forceinline__ int has_failed(const spar_kernel_copy &c)
{
    return load_acquire(&c.sync->failed) != 0;
}

__device__ __forceinline__ void offer(const spar_kernel_copy &c)
{
    spar_kernel_sync &s = *c.sync;
    if (threadIdx.x >= s.world || threadIdx.x == s.rank)
        return;
    unsigned *places = reach(s.offers[threadIdx.x]);
    _Pragma("unroll 1")
    for (unsigned t = 0; t < c.tensors; t++)
        places[t] = c.offer[t];
    store_release(s.theirs[threadIdx.x] + SPAR_KERNEL_RANKS, s.rounds + 1);
}

/* Whether a peer offered memory that is not in its slot. */
__device__ __forceinline__ int is_bad(const spar_kernel_copy &c)
{
    spar_kernel_sync &s = *c.sync;
    unsigned bad = 0;
    _Pragma("unroll 1")
    for (unsigned t = 0; t < c.tensors; t++)
        bad |= reach(s.places)[threadIdx.x * SPAR_KERNEL_TENSORS + t] > c.last[t];
    if (bad) {
        store_release(s.stop, SPAR_KERNEL_BAD_OFFER + threadIdx.x);
        store_release(&s.failed, 1);
    }
    return int(bad);
}

/* Waits until the peers' words from `words` on are of so many more rounds; returns whether the wait has ended
 * early. */
__device__ __forceinline__ int await_peers(const spar_kernel_copy &c, const unsigned *words, unsigned rounds)
{
    spar_kernel_sync &s = *c.sync;
    const unsigned round = s.rounds + rounds;
    const unsigned *word = words + threadIdx.x;
    if (threadIdx.x >= s.world || threadIdx.x == s.rank)
        return 0;
    const unsigned long long begin = now_ns();
    _Pragma("unroll 1")
    for (unsigned polls = 1; int(load_relaxed(word) - round) < 0; polls++) {
        pause();
        if (polls % 64) /* the host's memory is far */
            continue;
        const bool late = c.limit_ns && now_ns() - begin > c.limit_ns;
        if (!late && !load_acquire(s.stop))
            continue;
        if (late)
            store_release(s.stop, 1 + threadIdx.x);
        store_release(&s.failed, 1);
        return 1;
    }
    load_acquire(word);
    return 0;
}

__device__ __forceinline__ int await_offers(const spar_kernel_copy &c)
{
    if (await_peers(c, c.sync->mine + SPAR_KERNEL_RANKS, 1))
        return 1;
    return threadIdx.x < c.sync->world && threadIdx.x != c.sync->rank && is_bad(c);
}

/* After a CTA's copies: whether it is the last one of its launch to be here. */
__device__ __forceinline__ int is_last(const spar_kernel_copy &c)
{
    return threadIdx.x == 0 && count_to(&c.sync->ctas, gridDim.x - 1) == gridDim.x - 1;
}

__device__ __forceinline__ void signal(const spar_kernel_copy &c)
{
    spar_kernel_sync &s = *c.sync;
    if (threadIdx.x < s.world && threadIdx.x != s.rank)
        store_release(s.theirs[threadIdx.x], s.rounds + c.rounds);
}

__device__ __forceinline__ void end_rounds(const spar_kernel_copy &c)
{
    if (threadIdx.x == 0)
        c.sync->rounds += c.rounds;
}

/* Also where a wait ended early: what follows the call's last launch neither waits nor copies. The host may
 * then free what the launch uses, so its last CTA does it. */
__device__ __forceinline__ void mark_end(const spar_kernel_copy &c)
{
    if (threadIdx.x == 0)
        store_release(c.mark, c.number);
}
)

SPAR_PTX(
/* Each returns whether no wait has ended early. */
__device__ __forceinline__ bool begin_round(const spar_kernel_copy &c)
{
    if (__syncthreads_or(has_failed(c)))
        return false;
    if (!(c.mode & SPAR_KERNEL_OFFERS))
        return true;
    offer(c);
    return !__syncthreads_or(await_offers(c));
}

__device__ __forceinline__ bool pass_on(const spar_kernel_copy &c)
{
    if (c.mode & SPAR_KERNEL_SIGNALS) {
        __syncthreads();
        if (__syncthreads_or(is_last(c)))
            signal(c);
    }
    if (!(c.mode & SPAR_KERNEL_WAITS))
        return true;
    if (__syncthreads_or(await_peers(c, c.sync->mine, c.rounds)))
        return false;
    end_rounds(c);
    __syncthreads();
    return true;
}

template <int WIDTH, class SCALE> __device__ __forceinline__ void run(const spar_kernel_copy &c)
{
    bool goes_on = !c.sync || begin_round(c);
    _Pragma("unroll 1")
    for (int behind = 0; goes_on && behind < 2; behind++) {
        copy<WIDTH, SCALE>(c, behind ? c.sent : 0, behind ? c.tiles : c.sent);
        if (c.sync && !behind)
            goes_on = pass_on(c);
    }
    if (c.mark) {
        __syncthreads();
        if (__syncthreads_or(is_last(c)))
            mark_end(c);
    }
}
)
