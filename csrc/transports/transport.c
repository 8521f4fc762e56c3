/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/transport.h"

#include "base/env.h"
#include "base/util.h"

#include <stdio.h>
#include <string.h>

#ifndef SPAR_VERSION
#error "define SPAR_VERSION, as setup.py does"
#endif

_Static_assert(sizeof(spar_peer_info) == 736 && sizeof(spar_setup_result) == 256, "they travel as bytes");

/* Whether two processes may share memory. */
static int are_near(const spar_peer_info *a, const spar_peer_info *b)
{
    return memcmp(a->host, b->host, sizeof a->host) == 0 && a->endpoint.pid > 0 && b->endpoint.pid > 0 &&
           a->endpoint.nonce != b->endpoint.nonce;
}

void spar_hosts(const spar_peer_info *info, int world, int *hosts)
{
    for (int rank = 0; rank < world; rank++) {
        hosts[rank] = 0;
        while (hosts[rank] < rank &&
               !(hosts[hosts[rank]] == hosts[rank] && are_near(&info[hosts[rank]], &info[rank])))
            hosts[rank]++;
    }
}

extern const spar_transport spar_transport_shm, spar_transport_tcp, spar_transport_nccl, spar_transport_push,
    spar_transport_torch;
#ifdef SPAR_LOCAL
extern const spar_transport spar_transport_local;
#endif

const spar_transport *const spar_transports[] = {
#ifdef SPAR_LOCAL
    &spar_transport_local,
#endif
    &spar_transport_shm,   &spar_transport_tcp,   &spar_transport_push,
    &spar_transport_nccl,  &spar_transport_torch, NULL,
};

enum { ROWS = sizeof spar_transports / sizeof *spar_transports - 1 };

static spar_traffic traffic[ROWS];

static spar_traffic *traffic_of(const spar_transport *transport)
{
    int row = 0;
    while (row < ROWS - 1 && spar_transports[row] != transport)
        row++;
    return &traffic[row];
}

void spar_traffic_count(const spar_transport *transport, uint64_t bytes, uint64_t ns)
{
    spar_traffic *counted = traffic_of(transport);
    __atomic_fetch_add(&counted->calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counted->bytes, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counted->ns, ns, __ATOMIC_RELAXED);
}

spar_traffic spar_traffic_of(const spar_transport *transport)
{
    const spar_traffic *counted = traffic_of(transport);
    return (spar_traffic){__atomic_load_n(&counted->calls, __ATOMIC_RELAXED),
                          __atomic_load_n(&counted->bytes, __ATOMIC_RELAXED),
                          __atomic_load_n(&counted->ns, __ATOMIC_RELAXED)};
}

void spar_peer_info_read(spar_peer_info *info)
{
    spar_env_value transport, check;
    memset(info, 0, sizeof *info);
    snprintf(info->version, sizeof info->version, "%s", SPAR_VERSION);
    if (spar_env_check() != SPAR_OK || spar_env_field("transport", &transport) != SPAR_OK ||
        spar_env_field("check", &check) != SPAR_OK) {
        snprintf(info->error, sizeof info->error, "%s", spar_last_error());
        return;
    }
    if (strlen(transport.text) >= sizeof info->transport)
        snprintf(info->error, sizeof info->error,
                 "SPAR_TRANSPORT has %zu characters; expected the name of a transport, or ^ and one",
                 strlen(transport.text));
    snprintf(info->transport, sizeof info->transport, "%s", transport.text);
    snprintf(info->check, sizeof info->check, "%s", check.text);
    spar_core_set_read(&info->cores);
    for (const spar_transport *const *row = spar_transports; *row; row++)
        if ((*row)->probe)
            (*row)->probe(info);
}

static spar_status agree(const char *what, int rank, const char *first, const char *other)
{
    if (strcmp(first, other) == 0)
        return SPAR_OK;
    return spar_fail(SPAR_INVALID, "%s is '%s' on rank 0 and '%s' on rank %d; expected the same on all", what,
                     first, other, rank);
}

/* Finds the row that SPAR_TRANSPORT names, with or without a leading ^. */
static spar_status find(const char *request, const spar_transport **result)
{
    const char *name = request + (request[0] == '^');
    char names[128] = "";
    for (const spar_transport *const *row = spar_transports; *row; row++) {
        if (strcmp((*row)->name, name) == 0) {
            *result = *row;
            return SPAR_OK;
        }
        spar_append(names, sizeof names, "%s%s", *names ? ", " : "", (*row)->name);
    }
    return spar_fail(SPAR_INVALID, "SPAR_TRANSPORT is '%s'; known: %s, or ^ and one of them to exclude it",
                     request, names);
}

/* Whether a row was rejected because its set-up failed on some rank. */
static int is_refused(const spar_refusal *refused, const char *name, char *reason, size_t size)
{
    for (int i = 0; refused && i < refused->count; i++)
        if (strcmp(refused->names[i], name) == 0) {
            snprintf(reason, size, "%s", refused->reasons[i]);
            return 1;
        }
    return 0;
}

static int moves(const spar_transport *row, const char *device)
{
    return !row->device || strcmp(row->device, device) == 0;
}

/* Fails unless the peer infos are well-formed, without errors, and of ranks with the same settings. */
static spar_status check_infos(const spar_peer_info *info, int world, int first_rank)
{
    for (int rank = 0; rank < world; rank++)
        if (memchr(info[rank].error, 0, sizeof info->error) == NULL ||
            memchr(info[rank].version, 0, sizeof info->version) == NULL ||
            memchr(info[rank].transport, 0, sizeof info->transport) == NULL ||
            memchr(info[rank].check, 0, sizeof info->check) == NULL)
            return spar_fail(SPAR_TRANSPORT, "the peer info of rank %d is malformed", rank);
    for (int rank = 0; rank < world; rank++)
        SPAR_TRY(agree("spar's version", rank, info[0].version, info[rank].version));
    for (int rank = 0; rank < world; rank++)
        if (info[rank].error[0])
            return spar_fail(SPAR_INVALID, "rank %d: %s", first_rank + rank, info[rank].error);
    for (int rank = 0; rank < world; rank++) {
        SPAR_TRY(agree("SPAR_TRANSPORT", rank, info[0].transport, info[rank].transport));
        SPAR_TRY(agree("SPAR_CHECK", rank, info[0].check, info[rank].check));
    }
    return SPAR_OK;
}

spar_status spar_choose(const spar_peer_info *info, int world, int first_rank, const char *device,
                        const spar_refusal *refused, spar_choice *choice)
{
    const spar_transport *named = NULL;
    const char *request = info[0].transport;
    memset(choice, 0, sizeof *choice);
    SPAR_TRY(check_infos(info, world, first_rank));
    if (request[0])
        SPAR_TRY(find(request, &named));
    int is_forced = named && request[0] != '^' && moves(named, device);
    for (const spar_transport *const *row = spar_transports; *row; row++) {
        char reason[sizeof choice->reason] = "";
        if (is_forced && *row != named)
            snprintf(reason, sizeof reason, "SPAR_TRANSPORT=%s", request);
        else if (named && request[0] == '^' && *row == named)
            snprintf(reason, sizeof reason, "excluded by SPAR_TRANSPORT=%s", request);
        else if (!moves(*row, device))
            snprintf(reason, sizeof reason, "for %s tensors alone", (*row)->device);
        else if (!is_refused(refused, (*row)->name, reason, sizeof reason) &&
                 (*row)->serves(info, world, first_rank, reason, sizeof reason)) {
            choice->transport = *row;
            memcpy(choice->reason, reason, sizeof reason);
            return SPAR_OK;
        } else if (is_forced) {
            return spar_fail(SPAR_TRANSPORT, "SPAR_TRANSPORT=%s cannot serve: %s", request, reason);
        }
        choice->rejected_names[choice->rejected] = (*row)->name;
        memcpy(choice->rejected_reasons[choice->rejected++], reason, sizeof reason);
    }
    char reasons[512] = "";
    for (int i = 0; i < choice->rejected; i++)
        spar_append(reasons, sizeof reasons, "%s%s: %s", i ? ", " : "", choice->rejected_names[i],
                    choice->rejected_reasons[i]);
    return spar_fail(SPAR_TRANSPORT,
                     "SPAR_TRANSPORT=%s leaves no transport for %s tensors (%s); unset it, or set it to the "
                     "transport to use",
                     request, device, reasons);
}
