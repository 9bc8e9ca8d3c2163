/* What the files of the verbs provider without a device share. Each file's own part is called by the tests over ctypes. */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* Before (after = 0) and after each native call. The test's function may do whatever another thread could do then. */
void fake_point(const char *call, int after);

/* Objects are never freed, so that one that is used or destroyed after its end is noticed: what went wrong is in
   fake_fault(), which the test asks for at the end. */
void fake_fault(const char *call, const char *what);
int fake_check(const char *call, int alive);

/* Objects that exist. */
extern struct fake_counts {
    int32_t contexts;
    int32_t domains;
    int32_t channels;
    int32_t queues;
    int32_t queue_pairs;
    int32_t windows;
    int32_t event_channels;
    int32_t identifiers;
    int32_t armed;          /* how often queues were armed */
} fake_counts;

extern struct ibv_device fake_device;
extern pthread_mutex_t fake_lock;

/* A pipe that holds pointers: one end is read by ndpy. */
void fake_pipe(int *read_end, int *write_end);
void fake_push(int write_end, void *pointer);
/* NULL with errno if there is none. */
void *fake_pull(int read_end);
/* Wait, with fake_lock held, until *left is 0; a fault after ten seconds. */
void fake_wait_for(const char *call, const int *left);
void fake_changed(void);

/* fake_verbs.c: where events of a device are written to. */
int fake_async_end(struct ibv_context *context);
/* fake_queues.c */
void fake_fill_operations(struct ibv_context_ops *operations);
