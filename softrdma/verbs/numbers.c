/* See numbers.h. */
#include "numbers.h"
#include "address.h"
#include "forking.h"
#include "watch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PORT_QUEUE_PAIRS 256u
#define PORT_TRIES       64

struct port {
    struct port *next;
    uint16_t number;
    unsigned used;
    struct soft_qp *queue_pairs[PORT_QUEUE_PAIRS];
    unsigned next_index;
    socket_handle reserved[2]; /* of IPv4 and IPv6: bound to all addresses, and never listening */
    struct ear *ears;
};

struct ear {
    struct ear *next;
    struct port *port;
    struct sockaddr_storage address;
    struct listener *listener;
    unsigned users;
};

pthread_mutex_t numbers_lock = PTHREAD_MUTEX_INITIALIZER;
static struct port *ports;

/* ---- Ports ---- */

/* Not as for a listener: then Linux could give one port to two sockets that do not listen yet. */
static bool open_port(struct port *port)
{
    struct sockaddr_storage any4 = {.ss_family = AF_INET}, any6 = {.ss_family = AF_INET6}, bound;
    nd_status status;

    for (int i = 0; i < PORT_TRIES; i++) {
        port->reserved[0] = socket_bound(&any4, false, &status);
        if (port->reserved[0] == NO_SOCKET)
            return false;
        if (socket_address(port->reserved[0], &bound)) {
            port->number = address_port((struct sockaddr *)&bound);
            address_set_port((struct sockaddr *)&any6, port->number);
            port->reserved[1] = socket_bound(&any6, false, &status);
            /* A machine without IPv6 has no such address. */
            if (port->reserved[1] != NO_SOCKET ||
                (status != ND_SHARING_VIOLATION && status != ND_TOO_MANY_OPENED_FILES))
                return true;
        }
        socket_discard(port->reserved[0]);
    }
    return false;
}

static void close_port(struct port *port)
{
    for (int i = 0; i < 2; i++)
        if (port->reserved[i] != NO_SOCKET)
            socket_discard(port->reserved[i]);
    free(port);
}

int number_take(struct soft_qp *qp, uint32_t *number)
{
    int error = 0;

    pthread_mutex_lock(&numbers_lock);
    struct port *port = ports;
    while (port != NULL && port->used == PORT_QUEUE_PAIRS)
        port = port->next;
    if (port == NULL) {
        port = calloc(1, sizeof *port);
        if (port == NULL) {
            error = ENOMEM;
        } else if (!open_port(port)) {
            free(port);
            error = EMFILE;
        } else {
            port->next = ports;
            ports = port;
        }
    }
    if (error == 0) {
        /* A number that was just given back is used again as late as possible. */
        while (port->queue_pairs[port->next_index % PORT_QUEUE_PAIRS] != NULL)
            port->next_index++;
        unsigned index = port->next_index++ % PORT_QUEUE_PAIRS;
        port->queue_pairs[index] = qp;
        port->used++;
        *number = (uint32_t)port->number << 8 | index;
    }
    pthread_mutex_unlock(&numbers_lock);
    return error;
}

/* Under numbers_lock. */
static struct soft_qp **place(uint32_t number, struct port **out)
{
    for (struct port *port = ports; port != NULL; port = port->next)
        if (port->number == number >> 8) {
            if (out != NULL)
                *out = port;
            return &port->queue_pairs[number & 255];
        }
    return NULL;
}

struct soft_qp *number_owner(uint32_t number)
{
    struct soft_qp **at = place(number, NULL);
    return at != NULL ? *at : NULL;
}

void number_give_back(struct soft_qp *qp)
{
    struct port *port = NULL;

    pthread_mutex_lock(&numbers_lock);
    *place(qp->ibv.qp_num, &port) = NULL;
    bool last = --port->used == 0;
    if (last) {
        struct port **link = &ports;
        while (*link != port)
            link = &(*link)->next;
        *link = port->next;
    }
    pthread_mutex_unlock(&numbers_lock);
    if (last)
        close_port(port);
}

void numbers_forget(void)
{
    system_keep(ports);
    ports = NULL;
    pthread_mutex_init(&numbers_lock, NULL);
}

struct soft_qp *soft_qp_hold(uint32_t number)
{
    pthread_mutex_lock(&numbers_lock);
    struct soft_qp *qp = number_owner(number);
    if (qp != NULL)
        qp->references++;
    pthread_mutex_unlock(&numbers_lock);
    return qp;
}

struct soft_qp *soft_qp_numbered(uint32_t number)
{
    struct soft_qp *qp = soft_qp_hold(number);

    if (qp != NULL)
        soft_qp_drop(qp);
    return qp;
}

/* ---- Listening ---- */

static void share(socket_handle handle, int option, int on)
{
    setsockopt(handle, SOL_SOCKET, option, &on, sizeof on);
}

/* Linux lets a socket listen within what another one has reserved if both would share. The other one does so only for
 * this moment: else a stranger could listen on the port's other addresses. Sockets with SO_REUSEPORT share with those
 * of their user only. A process that has changed its user since it reserved the port has to do with SO_REUSEADDR. */
static int open_ear(struct ear *ear, struct adapter *adapter, listener_arrived *arrived)
{
    static const int options[] = {SO_REUSEPORT, SO_REUSEADDR};
    socket_handle reserved = ear->port->reserved[ear->address.ss_family == AF_INET6];
    nd_status status = ND_SHARING_VIOLATION;

    for (size_t i = 0; i < COUNT_OF(options) && status == ND_SHARING_VIOLATION; i++) {
        share(reserved, options[i], 1);
        socket_handle handle = socket_sharing(&ear->address, options[i], &status);
        if (handle != NO_SOCKET)
            status = listener_create(adapter, handle, arrived, NULL, &ear->listener);
        share(reserved, options[i], 0);
    }
    return soft_errno(status);
}

int number_listen(struct soft_qp *qp, const struct sockaddr_storage *own, listener_arrived *arrived, struct ear **out)
{
    struct port *port = NULL;

    place(qp->ibv.qp_num, &port);
    struct ear *ear = port->ears;
    while (ear != NULL && !address_same((const struct sockaddr *)&ear->address, (const struct sockaddr *)own))
        ear = ear->next;
    if (ear == NULL) {
        ear = calloc(1, sizeof *ear);
        if (ear == NULL)
            return ENOMEM;
        ear->port = port;
        ear->address = *own;
        address_set_port((struct sockaddr *)&ear->address, port->number);
        int error = open_ear(ear, adapter_of(qp->ibv.context), arrived);
        if (error != 0) {
            free(ear);
            return error;
        }
        ear->next = port->ears;
        port->ears = ear;
    }
    ear->users++;
    *out = ear;
    return 0;
}

void number_unlisten(struct ear *ear)
{
    if (ear == NULL)
        return;
    pthread_mutex_lock(&numbers_lock);
    bool last = --ear->users == 0;
    if (last) {
        struct ear **link = &ear->port->ears;
        while (*link != ear)
            link = &(*link)->next;
        *link = ear->next;
        /* The next one on this address need not wait until a request was handled. */
        listener_stop(ear->listener);
    }
    pthread_mutex_unlock(&numbers_lock);
    if (!last)
        return;
    listener_close(ear->listener);
    free(ear);
}
