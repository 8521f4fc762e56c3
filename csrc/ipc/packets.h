/* SPDX-License-Identifier: Apache-2.0 */
/* Packets of a SOCK_SEQPACKET connection, which may carry a descriptor. Nothing here waits. */
#ifndef SPAR_PACKETS_H
#define SPAR_PACKETS_H

#include "base/error.h"

#include <stddef.h>

/* Sends bytes with a descriptor, which -1 leaves out, as one packet; 0, or errno. */
int spar_packet_send(int socket, const void *bytes, size_t size, int fd);

/* Receives a packet of `size` bytes, which has come; *fd: its descriptor, or -1. SPAR_TRANSPORT for another
 * size, and for more than one descriptor: the bytes are 0 then. The same for a descriptor that this process
 * has no room for, which is lost: the bytes are the packet's. */
spar_status spar_packet_receive(int socket, void *bytes, size_t size, int *fd);

#endif
