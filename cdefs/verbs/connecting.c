/* rdma_connect() in a thread that can be made to give up.

   Some drivers open the TCP connection inside the call. If the peer is silent, that takes until TCP gives up, and
   nobody can destroy the queue pair before. The call is a write() to the connection manager's file, in which a signal
   ends the wait. pthread_cancel() sends a signal that belongs to the C library, so no handler of the program is
   involved. It ends the thread as well. Therefore this thread runs no Python. */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

struct ndpy_connecting {
    struct rdma_cm_id *id;
    struct rdma_conn_param *parameters;
    sem_t news; /* the call has returned, or shall give up */
    atomic_int given_up;
    int error;
};

struct ndpy_connecting *ndpy_connecting_new(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    struct ndpy_connecting *connecting = calloc(1, sizeof *connecting);

    if (!connecting)
        return NULL;
    connecting->id = id;
    connecting->parameters = parameters;
    sem_init(&connecting->news, 0, 0);
    return connecting;
}

static void *connect_and_tell(void *argument)
{
    struct ndpy_connecting *connecting = argument;

    connecting->error = rdma_connect(connecting->id, connecting->parameters) ? errno : 0;
    sem_post(&connecting->news);
    return NULL;
}

/* glibc ends a thread with the help of this library, and aborts the program if it is missing. */
static int can_cancel(void)
{
#ifdef __GLIBC__
    return dlopen("libgcc_s.so.1", RTLD_NOW) != NULL;
#else
    return 1;
#endif
}

int ndpy_connecting_run(struct ndpy_connecting *connecting)
{
    sigset_t all, former;
    pthread_t thread;
    void *result;
    int error;

    /* A signal of the program would end the call early. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    error = pthread_create(&thread, NULL, connect_and_tell, connecting);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    if (error)
        return rdma_connect(connecting->id, connecting->parameters) ? errno : 0;
    while (sem_wait(&connecting->news) && errno == EINTR)
        ;
    if (atomic_load(&connecting->given_up) && can_cancel())
        pthread_cancel(thread);
    pthread_join(thread, &result);
    return result == PTHREAD_CANCELED ? ECANCELED : connecting->error;
}

void ndpy_connecting_give_up(struct ndpy_connecting *connecting)
{
    atomic_store(&connecting->given_up, 1);
    sem_post(&connecting->news);
}

void ndpy_connecting_free(struct ndpy_connecting *connecting)
{
    sem_destroy(&connecting->news);
    free(connecting);
}
