/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/packets.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

int spar_packet_send(int socket, const void *bytes, size_t size, int fd)
{
    union {
        struct cmsghdr header; /* for its alignment */
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.room = {0}};
    struct iovec part = {(void *)(uintptr_t)bytes, size};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        envelope.msg_control = &control;
        envelope.msg_controllen = sizeof control.room;
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    return sendmsg(socket, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size ? 0 : errno;
}

spar_status spar_packet_receive(int socket, void *bytes, size_t size, int *fd)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {bytes, size};
    struct msghdr envelope = {.msg_iov = &part,
                              .msg_iovlen = 1,
                              .msg_control = &control,
                              .msg_controllen = CMSG_LEN(sizeof(int))}; /* room for one, no more */
    ssize_t got = recvmsg(socket, &envelope, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = got < 0 ? NULL : CMSG_FIRSTHDR(&envelope);
    *fd = -1;
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof *fd))
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    if (got == (ssize_t)size && !(envelope.msg_flags & (MSG_CTRUNC | MSG_TRUNC)))
        return SPAR_OK;
    spar_status status = spar_fail(SPAR_TRANSPORT, "%s",
                                   !(envelope.msg_flags & MSG_CTRUNC) ? "a message of another size"
                                   : *fd >= 0                         ? "more than one descriptor"
                                                                      : "a descriptor could not be received: "
                                                                        "too many open files");
    if (got != (ssize_t)size || envelope.msg_flags & MSG_TRUNC || *fd >= 0)
        memset(bytes, 0, size);
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return status;
}
