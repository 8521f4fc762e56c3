/* SPDX-License-Identifier: Apache-2.0 */
/* The address at which other hosts reach this one. */
#include "ipc/tcp.h"

#include "base/env.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Copies an IPv4 or IPv6 address; 0: it is neither. */
static int copy(spar_tcp_endpoint *own, const struct sockaddr *from)
{
    memset(own->address, 0, sizeof own->address);
    own->scope = 0;
    own->family = from->sa_family;
    if (from->sa_family == AF_INET) {
        memcpy(own->address, &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
        return 1;
    }
    if (from->sa_family != AF_INET6)
        return 0;
    const struct sockaddr_in6 *six = (const void *)from;
    memcpy(own->address, &six->sin6_addr, 16);
    own->scope = six->sin6_scope_id;
    return 1;
}

static int is_loopback(const spar_tcp_endpoint *own)
{
    static const unsigned char one[16] = {[15] = 1};
    return own->family == AF_INET ? own->address[0] == 127 : memcmp(own->address, one, sizeof one) == 0;
}

static int is_link_local(const spar_tcp_endpoint *own)
{
    return own->family == AF_INET6 && own->address[0] == 0xfe && (own->address[1] & 0xc0) == 0x80;
}

/* How well an interface's address serves: IPv4 first, as in gloo; link-local addresses last. */
static int rank_address(const spar_tcp_endpoint *address)
{
    return address->family == AF_INET ? 3 : is_link_local(address) ? 1 : 2;
}

/* Finds the best address of an interface; of any that is up and no loopback if `name` is NULL. */
static int from_interfaces(const char *name, size_t length, spar_tcp_endpoint *own)
{
    struct ifaddrs *list;
    int best = 0;
    if (getifaddrs(&list) != 0)
        return 0;
    for (const struct ifaddrs *each = list; each; each = each->ifa_next) {
        spar_tcp_endpoint address = *own;
        const unsigned wanted = IFF_UP | IFF_RUNNING;
        if (!each->ifa_addr || !copy(&address, each->ifa_addr))
            continue;
        int fits = name ? strlen(each->ifa_name) == length && memcmp(each->ifa_name, name, length) == 0
                        : (each->ifa_flags & wanted) == wanted && !is_loopback(&address);
        if (fits && rank_address(&address) > best) {
            best = rank_address(&address);
            *own = address;
        }
    }
    freeifaddrs(list);
    return best > 0;
}

/* Finds the address from which a host is reached. Connecting a datagram socket sends nothing. */
static int from_route(const char *host, spar_tcp_endpoint *own)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
    struct addrinfo *found;
    int known = 0;
    if (getaddrinfo(host, "1", &hints, &found) != 0)
        return 0;
    for (const struct addrinfo *each = found; each && !known; each = each->ai_next) {
        struct sockaddr_storage local;
        socklen_t size = sizeof local;
        int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            continue;
        known = connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
                getsockname(fd, (struct sockaddr *)&local, &size) == 0 &&
                copy(own, (const struct sockaddr *)&local);
        close(fd);
    }
    freeaddrinfo(found);
    return known;
}

spar_status spar_tcp_own_address(spar_tcp_endpoint *own)
{
    const char *name = spar_env_text("GLOO_SOCKET_IFNAME"), *master = spar_env_text("MASTER_ADDR");
    if (name && *name) {
        size_t length = strcspn(name, ","); /* gloo uses several in turn */
        if (from_interfaces(name, length, own))
            return SPAR_OK;
        return spar_fail(SPAR_TRANSPORT, "GLOO_SOCKET_IFNAME is '%.32s': no such interface has an address",
                         name);
    }
    /* On the master's own host its name often means a loopback address. */
    if (master && *master && from_route(master, own) && !is_loopback(own))
        return SPAR_OK;
    if (from_interfaces(NULL, 0, own))
        return SPAR_OK;
    const struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    copy(own, (const struct sockaddr *)&loopback);
    return SPAR_OK;
}

void spar_tcp_address_text(const spar_tcp_endpoint *endpoint, char *text)
{
    if (!inet_ntop(endpoint->family, endpoint->address, text, SPAR_TCP_TEXT))
        *text = 0;
}
