/* Shared by the files of the verbs provider without a device. The tests call the functions of each file over ctypes. */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/stat.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* Called before (after = 0) and after each native call. The test's function may do what another thread could do. */
void fake_point(const char *call, int after);

/* Note a wrong use of an object. Objects are never freed, so a use after the end is noticed. At its end the
   test asks for the first fault. */
void fake_fault(const char *call, const char *what);
int fake_check(const char *call, int alive);
/* The point before a call, and fake_lock. fake_end() gives it back, and returns the result of the call. */
void fake_begin(const char *call);
int fake_end(const char *call, int result);

/* How many objects exist. */
extern struct fake_counts {
    int32_t contexts;
    int32_t domains;
    int32_t channels;
    int32_t queues;
    int32_t queue_pairs;
    int32_t windows;
    int32_t event_channels;
    int32_t identifiers;
    int32_t paths;    /* address handles */
    int32_t attached; /* of queue pairs to multicast groups */
    int32_t device_memories;
    int32_t xrc_domains;
    int32_t xrc_queues;
    int32_t armed; /* how often queues were armed */
} fake_counts;

/* The test sets and reads these. wc_flags: the IBV_WC_EX_WITH_… that extended queues take besides the standard ones.
   created_with, created_flags: those of the last one, and its IBV_CREATE_CQ_ATTR_… */
extern struct fake_extended {
    int32_t queues;
    int32_t wc_flags;
    int32_t created_with;
    int32_t created_flags;
    int32_t clock_khz;
    int32_t ticks;
    int32_t clock_bits;
    int32_t bound_length; /* of the last ibv_bind_mw(), as bound_access */
    int32_t bound_access;
    int32_t capabilities; /* atomic writes 1, flushing globally 2, persistently 4 */
    int32_t operations;   /* the IBV_QP_EX_WITH_… that queue pairs can be created for */
    uint64_t created_for;
    uint64_t posted_address; /* of the last request that such a queue pair got, as the following */
    uint64_t posted_value;   /* the length of a flush */
    int32_t posted_token;
    int32_t posted_flags;
    int32_t posted_kinds;
    int32_t posted_level;
    int32_t next_polls; /* how often an extended queue was asked for its next entry */
} fake_extended;

/* The test sets these. If it is not 0, the next such call fails with this errno. */
extern struct fake_failures {
    int32_t poll; /* so many fail */
    int32_t arm;
    int32_t destroy_cq;
    int32_t destroy_qp;
    int32_t modify_qp;
    int32_t create_qp;
    int32_t complete; /* ibv_wr_complete() */
} fake_failures;
/* Its value, which is 0 from now on. */
int fake_failure(int32_t *number);

extern struct ibv_device fake_device;
extern pthread_mutex_t fake_lock;

/* Make a pipe that carries pointers. ndpy reads one end. */
void fake_pipe(int *read_end, int *write_end);
void fake_push(int write_end, void *pointer);
/* The next pointer, or NULL with errno if there is none. */
void *fake_pull(int read_end);
/* Wait until *left is 0, with fake_lock held. After ten seconds it notes a fault. */
void fake_wait_for(const char *call, const int *left);
void fake_changed(void);

/* From fake_xrc.c. The test says whether the device has XRC. A message of a sender: where its bytes are and go, and for
 * which shared receive queue it is. */
extern int32_t fake_xrc;
struct fake_message {
    struct ibv_sge element;
    enum ibv_wr_opcode opcode;
    uint32_t queue;
    uint32_t immediate;
    uint64_t remote;
};
struct fake_message fake_message(const struct ibv_send_wr *wr);
int fake_arrives(struct ibv_qp *receiver, const struct fake_message *message);
/* Whether a queue pair takes these attributes. */
int fake_takes(const struct ibv_qp *qp, const struct ibv_qp_attr *attributes, int mask);
struct ibv_qp *fake_create_in_domain(struct ibv_context *context, struct ibv_qp_init_attr_ex *request);
void fake_leave_domain(struct ibv_qp *receiver);
int fake_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
void fake_fill_xrc_operations(struct verbs_context *verbs);

/* From fake_verbs.c: whether there are queue pairs for datagrams only. */
int fake_is_unconnected(void);
/* From fake_verbs.c: the descriptor to which events of a device are written. */
int fake_async_end(struct ibv_context *context);
/* From fake_queues.c. */
struct ibv_qp *fake_create_receiver(struct ibv_context *context, void *own);
void fake_fill_operations(struct ibv_context_ops *operations);
void fake_fill_extended_operations(struct verbs_context *verbs);
/* From fake_completions.c. */
void fake_fill_completion_operations(struct verbs_context *verbs);
int fake_is_queue(struct ibv_cq *cq);
/* With fake_lock. */
void fake_add_completion(struct ibv_cq *cq, const struct ibv_wc *completion);
void fake_use_queue(struct ibv_cq *cq, int change);
