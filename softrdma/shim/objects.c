/* The objects of the program: where they are found, and what is replaced in them. */
#include "shim.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define BUCKETS 1024u

pthread_mutex_t shim_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic int64_t live[LIVE_KINDS];
static struct object *buckets[BUCKETS];
static _Atomic uint32_t waiting;
static uint32_t qps_made;
static _Thread_local int cancelable;

/* A thread that polls again and again would otherwise have the lock nearly all the time. */
void lock(void)
{
    int state;

    /* A thread that is canceled in a write() would keep the lock. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (pthread_mutex_trylock(&shim_lock) != 0) {
        waiting++;
        pthread_mutex_lock(&shim_lock);
        waiting--;
    }
    cancelable = state;
}

void unlock(void)
{
    int state = cancelable;

    pthread_mutex_unlock(&shim_lock);
    if (waiting > 0)
        sched_yield();
    pthread_setcancelstate(state, NULL);
}

void live_change(enum live kind, int change)
{
    /* What librdmacm makes for itself does not count. */
    if (inside == 0)
        live[kind] += change;
}

/* ---- Where they are found ---- */

static struct object **bucket_of(const void *key)
{
    return &buckets[((uintptr_t)key >> 4) * 2654435761u % BUCKETS];
}

struct object *object_find(enum object_kind kind, const void *key)
{
    struct object *object = *bucket_of(key);

    while (object != NULL && (object->key != key || object->kind != kind))
        object = object->next;
    return object;
}

void *object_new(enum object_kind kind, const void *key, size_t size)
{
    struct object *object = calloc(1, size);

    if (object == NULL)
        return NULL;
    object->kind = kind;
    object->key = key;
    object->next = *bucket_of(key);
    *bucket_of(key) = object;
    return object;
}

void object_free(struct object *object)
{
    struct object **at = bucket_of(object->key);

    while (*at != NULL && *at != object)
        at = &(*at)->next;
    if (*at != NULL)
        *at = object->next;
    free(object);
}

void each_object(enum object_kind kind, void (*act)(struct object *, void *), void *what)
{
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct object *object = buckets[i], *next; object != NULL; object = next) {
            next = object->next;
            if (object->kind == kind)
                act(object, what);
        }
}

/* ---- Contexts ---- */

static bool is_taken(const struct ibv_context *ibv)
{
    for (unsigned i = 0; i < MAX_LIBRARIES; i++)
        if (ibv->ops.poll_cq == request_ops[i].poll_cq)
            return true;
    return false;
}

#define WITH_MEMBERS(DO) \
    DO(create_cq_ex)     \
    DO(create_qp_ex)     \
    DO(create_srq_ex)    \
    DO(create_wq)        \
    DO(open_qp)          \
    DO(reg_dm_mr)        \
    DO(alloc_null_mr)    \
    DO(query_port)

static void put_back(struct context *context)
{
    struct verbs_context *verbs = verbs_get_ctx(context->ibv);

    if (!is_taken(context->ibv))
        return;
    context->ibv->ops = context->ops;
#define PUT_BACK(member)                        \
    if (verbs_get_ctx_op(context->ibv, member)) \
        verbs->member = context->member;
    WITH_MEMBERS(PUT_BACK)
#undef PUT_BACK
    if (context->fd >= 0)
        context->ibv->async_fd = context->real_fd;
}

struct context *context_of(unsigned library, struct ibv_context *ibv)
{
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv);

    if (context != NULL && is_taken(ibv))
        return context;
    /* A library closed it by itself and opened another one. */
    if (context != NULL)
        object_free(&context->object);
    context = object_new(OBJECT_CONTEXT, ibv, sizeof *context);
    if (context == NULL)
        return NULL;
    context->ibv = ibv;
    context->library = library;
    context->ops = ibv->ops;
    context->real_fd = ibv->async_fd;
    /* Nobody reads the field while a device is opened. Later it changes for calls that create (creation_begin()). */
    context->fd = has_faults_at(AT_ADAPTER) ? eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC) : -1;
    if (context->fd >= 0) {
        fcntl(context->real_fd, F_SETFL, fcntl(context->real_fd, F_GETFL) | O_NONBLOCK);
        ibv->async_fd = context->fd;
        thread_watch(context->real_fd);
    }
    const struct ibv_context_ops *own = &request_ops[library];
    ibv->ops.poll_cq = own->poll_cq;
    ibv->ops.req_notify_cq = own->req_notify_cq;
    ibv->ops.post_send = own->post_send;
    ibv->ops.post_recv = own->post_recv;
    ibv->ops.post_srq_recv = own->post_srq_recv;
    if (ibv->ops.alloc_mw != NULL)
        ibv->ops.alloc_mw = own->alloc_mw;
    if (ibv->ops.dealloc_mw != NULL)
        ibv->ops.dealloc_mw = own->dealloc_mw;
    struct verbs_context *verbs = verbs_get_ctx(ibv);
#define TAKE(member)                               \
    if (verbs_get_ctx_op(ibv, member)) {           \
        context->member = verbs->member;           \
        verbs->member = extended_stand_ins.member; \
    }
    WITH_MEMBERS(TAKE)
#undef TAKE
    return context;
}

static void forget_of(struct object *object, void *what)
{
    const struct context *context = what;

    if (object->kind == OBJECT_QP && ((struct qp *)object)->context == context)
        qp_forget((struct qp *)object);
    if (object->kind == OBJECT_CQ && ((struct cq *)object)->context == context)
        cq_forget((struct cq *)object);
    if (object->kind == OBJECT_CHANNEL && ((struct channel *)object)->context == context)
        channel_forget((struct channel *)object);
}

void context_forget(struct context *context)
{
    each_object(OBJECT_QP, forget_of, context);
    each_object(OBJECT_CQ, forget_of, context);
    each_object(OBJECT_CHANNEL, forget_of, context);
    if (context->fd >= 0) {
        thread_unwatch(context->real_fd);
        put_back(context);
        close(context->fd);
    } else
        put_back(context);
    while (context->events != NULL) {
        struct async_event *event = context->events;
        context->events = event->next;
        free(event);
    }
    object_free(&context->object);
}

/* ---- Channels ---- */

struct channel *channel_of(struct ibv_comp_channel *ibv)
{
    struct channel *channel = (struct channel *)object_find(OBJECT_CHANNEL, ibv);
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv->context);

    if (channel != NULL && channel->fd == ibv->fd)
        return channel;
    if (channel != NULL)
        channel_forget(channel);
    if (context == NULL)
        return NULL;
    int fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    channel = fd >= 0 ? object_new(OBJECT_CHANNEL, ibv, sizeof *channel) : NULL;
    if (channel == NULL) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    channel->ibv = ibv;
    channel->context = context;
    channel->real_fd = ibv->fd;
    channel->fd = fd;
    channel->last = &channel->first;
    /* A program may have set it already. */
    int flags = fcntl(channel->real_fd, F_GETFL);
    fcntl(fd, F_SETFL, flags);
    fcntl(channel->real_fd, F_SETFL, flags | O_NONBLOCK);
    ibv->fd = fd;
    thread_watch(channel->real_fd);
    return channel;
}

void channel_forget(struct channel *channel)
{
    thread_unwatch(channel->real_fd);
    if (channel->ibv->fd == channel->fd)
        channel->ibv->fd = channel->real_fd;
    close(channel->fd);
    while (channel->first != NULL) {
        struct channel_event *event = channel->first;
        channel->first = event->next;
        free(event);
    }
    object_free(&channel->object);
}

/* ---- Creating ---- */

struct ibv_comp_channel *creation_begin(struct ibv_context *ibv, struct ibv_comp_channel *channel,
                                        struct ibv_comp_channel *copy)
{
    lock();
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv);
    struct channel *known = channel != NULL ? (struct channel *)object_find(OBJECT_CHANNEL, channel) : NULL;
    if (context == NULL || ibv->cmd_fd < 0)
        return channel;
    if (context->fd >= 0)
        ibv->async_fd = context->real_fd;
    if (known == NULL)
        return channel;
    *copy = *channel;
    copy->fd = known->real_fd;
    return copy;
}

void creation_end(struct ibv_context *ibv, struct ibv_comp_channel *channel, struct ibv_comp_channel *copy,
                  struct ibv_cq *cq)
{
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv);

    if (context != NULL && context->fd >= 0)
        ibv->async_fd = context->fd;
    if (cq != NULL && cq->channel == copy && copy != NULL) {
        cq->channel = channel;
        channel->refcnt++;
    }
    unlock();
}

/* ---- Completion queues ---- */

struct cq *cq_of(struct ibv_cq *ibv)
{
    struct cq *cq = (struct cq *)object_find(OBJECT_CQ, ibv);
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv->context);

    if (cq != NULL || context == NULL)
        return cq;
    cq = object_new(OBJECT_CQ, ibv, sizeof *cq);
    if (cq == NULL)
        return NULL;
    cq->ibv = ibv;
    cq->context = context;
    cq->channel = ibv->channel != NULL ? channel_of(ibv->channel) : NULL;
    cq->last = &cq->first;
    return cq;
}

static void of_cq_gone(struct object *object, void *what)
{
    struct qp *qp = (struct qp *)object;

    if (qp->send_cq == what)
        qp->send_cq = NULL;
    if (qp->recv_cq == what)
        qp->recv_cq = NULL;
}

void cq_forget(struct cq *cq)
{
    each_object(OBJECT_QP, of_cq_gone, cq);
    if (cq->channel != NULL) {
        struct channel *channel = cq->channel;
        for (struct channel_event **at = &channel->first; *at != NULL;) {
            struct channel_event *event = *at;
            uint64_t one;
            if (event->cq != cq) {
                at = &event->next;
                continue;
            }
            *at = event->next;
            free(event);
            int flags = fcntl(channel->fd, F_GETFL);
            fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK);
            if (read(channel->fd, &one, sizeof one) < 0)
                one = 0;
            fcntl(channel->fd, F_SETFL, flags);
        }
        channel->last = &channel->first;
        while (*channel->last != NULL)
            channel->last = &(*channel->last)->next;
    }
    extended_cq_give(cq);
    while (cq->first != NULL) {
        struct completion *completion = cq->first;
        cq->first = completion->next;
        free(completion);
    }
    free(cq->current);
    records_of_cq_free(cq);
    object_free(&cq->object);
}

/* ---- Queue pairs ---- */

/* sq_sig_all: that of the call that has made it; NULL: not known. siw's ibv_query_qp(3) always says 1. */
static struct qp *qp_take(struct ibv_qp *ibv, const int *sq_sig_all)
{
    struct qp *qp = (struct qp *)object_find(OBJECT_QP, ibv);
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv->context);

    if (qp != NULL || context == NULL)
        return qp;
    qp = object_new(OBJECT_QP, ibv, sizeof *qp);
    if (qp == NULL)
        return NULL;
    qp->ibv = ibv;
    qp->context = context;
    qp->send_cq = ibv->send_cq != NULL ? cq_of(ibv->send_cq) : NULL;
    qp->recv_cq = ibv->recv_cq != NULL ? cq_of(ibv->recv_cq) : NULL;
    qp->number = ++qps_made;
    qp->sends.last = &qp->sends.first;
    qp->receives.last = &qp->receives.first;
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr initial = {.sq_sig_all = 1};
    if (REAL(context->library, ibv_query_qp)(ibv, &attributes, IBV_QP_CAP, &initial) == 0 || sq_sig_all != NULL)
        qp->all_signaled = (sq_sig_all != NULL ? *sq_sig_all : initial.sq_sig_all) != 0;
    /* Its silent requests have completions too, and so have datagrams that come twice. */
    uint32_t more = qp->all_signaled ? 0 : initial.cap.max_send_wr;
    if (ibv->qp_type == IBV_QPT_UD && has_faults_of(FAULT_DUPLICATE))
        more += initial.cap.max_send_wr;
    if (more > 0 && qp->send_cq != NULL) {
        struct ibv_cq *queue = qp->send_cq->ibv;
        qp->send_cq->slots += more;
        REAL(context->library, ibv_resize_cq)(queue, queue->cqe + (int)more);
    }
    return qp;
}

static void unnumber(struct object *object, void *what)
{
    (void)what;
    ((struct qp *)object)->number = 0;
}

void qps_renumber(void)
{
    qps_made = 0;
    each_object(OBJECT_QP, unnumber, NULL);
}

struct qp *qp_of(struct ibv_qp *ibv)
{
    return qp_take(ibv, NULL);
}

struct qp *qp_made(struct ibv_qp *ibv, int sq_sig_all)
{
    return qp_take(ibv, &sq_sig_all);
}

void qp_forget(struct qp *qp)
{
    extended_qp_give(qp);
    while (qp->late != NULL) {
        struct late_receive *late = qp->late;
        qp->late = late->next;
        record_free(late->record);
        free(late);
    }
    datagrams_forget(qp);
    queue_free(&qp->sends);
    queue_free(&qp->receives);
    records_of_qp_orphan(qp);
    object_free(&qp->object);
}

struct search {
    const struct context *context;
    uint32_t qp_num;
    struct qp *found;
};

static void is_numbered(struct object *object, void *what)
{
    struct search *search = what;
    struct qp *qp = (struct qp *)object;

    if (qp->ibv->qp_num == search->qp_num && qp->context == search->context)
        search->found = qp;
}

struct qp *qp_numbered(const struct context *context, uint32_t qp_num)
{
    struct search search = {context, qp_num, NULL};

    each_object(OBJECT_QP, is_numbered, &search);
    return search.found;
}

/* ---- Fork ---- */

static void child_context(struct object *object, void *what)
{
    (void)what;
    put_back((struct context *)object);
}

static void child_channel(struct object *object, void *what)
{
    struct channel *channel = (struct channel *)object;

    (void)what;
    channel->ibv->fd = channel->real_fd;
}

static _Thread_local unsigned preparing; /* a fork: how often before_fork() was called */

/* The child has no thread of the shim's, and nothing of its parent's works in it but what the library lets it do. */
static void in_child(void)
{
    each_object(OBJECT_CHANNEL, child_channel, NULL);
    each_object(OBJECT_CONTEXT, child_context, NULL);
    memset(buckets, 0, sizeof buckets);
    pthread_mutex_init(&shim_lock, NULL);
    if (preparing > 0)
        pthread_setcancelstate(cancelable, NULL);
    preparing = 0;
    waiting = 0;
    thread_forget();
}

static void before_fork(void)
{
    if (preparing++ == 0)
        lock();
}

static void in_parent(void)
{
    if (preparing > 0 && --preparing == 0)
        unlock();
}

void watch_forks(unsigned library)
{
    static atomic_flag watched[MAX_LIBRARIES];

    if (!atomic_flag_test_and_set(&watched[library]))
        pthread_atfork(before_fork, in_parent, in_child);
}

__attribute__((constructor)) static void load(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}
