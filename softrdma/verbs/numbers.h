/* Numbers of queue pairs.
 *
 * A number has 16 bits of a TCP port and 8 bits of an index. The process that has the queue pair reserves the port on
 * all addresses as long as it has such queue pairs, so that no other program gets it. It listens only on addresses by
 * which a queue pair expects its peer.
 */
#ifndef SOFTVERBS_NUMBERS_H
#define SOFTVERBS_NUMBERS_H

#include "listener.h"
#include "soft.h"

/* Outside of all others, except for those of struct soft_qp. */
extern pthread_mutex_t numbers_lock;

/* 0, or an errno. */
int number_take(struct soft_qp *qp, uint32_t *number);
void number_give_back(struct soft_qp *qp);
/* NULL: the number is not in use. Under numbers_lock. */
struct soft_qp *number_owner(uint32_t number);

/* One address that a port is listened on. The queue pairs that expect a peer there share it. */
struct ear;
/* 0, or an errno. `own` is the address; its port is ignored. Under numbers_lock. */
int number_listen(struct soft_qp *qp, const struct sockaddr_storage *own, listener_arrived *arrived, struct ear **out);
/* Without locks. NULL: does nothing. */
void number_unlisten(struct ear *ear);

/* In a forked child: no number is in use. */
void numbers_forget(void);

#endif
