/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of rounds, behind kernels.cu in each includer but kernels.h, and like that without directives.
 *
 * A launch with `sync` is part of a round between ranks that write to each other's slots. In a round a rank
 * copies into the peers' slots, after which the last CTA signals each peer; then one CTA waits for every
 * peer's signal, which ends the round. What came is copied out of this rank's slot beside what the next
 * round sends, before its signal; what the last one brought, behind its wait. A small round is one launch of
 * one CTA; else waiting is a launch of its own, so that CTAs that wait hold no SMs. The number of rounds is
 * in device memory, so that a graph can be replayed, and selects one of a slot's two halves. A rank begins a
 * round when all peers have signalled the one before, which they did after they had emptied what this round
 * overwrites. So there is no signal for an emptied slot, and sending waits for nothing.
 *
 * In a direct call the peers write to outputs, whose places each rank offers them at its begin: memory of
 * its slot that the stream no longer uses. One CTA then waits for the peers' offers, which wait for
 * nothing. Each place is compared with the last one from which on the tensor is in the slot. Ranks that
 * need not know when a part of a call has come make all its rounds at once. */

SPAR_PTX(
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
    store_release(s.theirs[threadIdx.x] + SPAR_KERNEL_RANKS, s.offered + 1);
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

/* Waits until the peers' words from `words` on are `number` or newer; returns whether that ended early. */
__device__ __forceinline__ int await_peers(const spar_kernel_copy &c, const unsigned *words, unsigned number)
{
    spar_kernel_sync &s = *c.sync;
    const unsigned *word = words + threadIdx.x;
    if (threadIdx.x >= s.world || threadIdx.x == s.rank)
        return 0;
    const unsigned long long begin = now_ns();
    _Pragma("unroll 1")
    for (unsigned polls = 1; int(load_relaxed(word) - number) < 0; polls++) {
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
    if (await_peers(c, c.sync->mine + SPAR_KERNEL_RANKS, c.sync->offered + 1))
        return 1;
    return threadIdx.x < c.sync->world && threadIdx.x != c.sync->rank && is_bad(c);
}

__device__ __forceinline__ void end_offers(const spar_kernel_copy &c)
{
    if (threadIdx.x == 0)
        c.sync->offered++;
}

__device__ __forceinline__ int await_signals(const spar_kernel_copy &c)
{
    return await_peers(c, c.sync->mine, c.sync->rounds + c.rounds);
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
    if (__syncthreads_or(await_offers(c)))
        return false;
    end_offers(c);
    return true;
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
    if (__syncthreads_or(await_signals(c)))
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
