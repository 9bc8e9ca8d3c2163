/* Numbers of queue pairs, and connections that programs make with ibv_modify_qp().
 *
 * A number has 16 bits of a TCP port and 8 bits of an index. The process that has the queue pair listens on the port. So
 * a GID and a number, which programs exchange by their own means, say where the peer's queue pair is.
 *
 * Both ends know both numbers and GIDs. The end whose pair of them is smaller connects, the other one accepts. The start-up
 * frame carries both numbers as private data.
 */
#ifndef SOFTVERBS_BY_HAND_H
#define SOFTVERBS_BY_HAND_H

#include "soft.h"

/* 0, or an errno. */
int number_take(struct soft_qp *qp, uint32_t *number);
void number_give_back(struct soft_qp *qp);

/* In a forked child: no number is in use. */
void numbers_forget(void);

/* Whether these attributes name a peer. rdma_init_qp_attr() gives a GID and a number of zeros. */
bool hand_names_a_peer(const struct ibv_qp_attr *attributes);
/* Whether they name a peer without its GID, which could not be found. */
bool hand_names_nobody(const struct ibv_qp_attr *attributes);
/* Whether the peer can be connected to. 0, or an errno. Under the queue pair's lock. */
int hand_check(struct soft_qp *qp);
/* Begins to connect or to wait for the peer. It goes on in the background until hand_close(). */
void hand_connect(struct soft_qp *qp);
/* After the queue pair's retry time has changed. This and hand_close() do nothing for one that was not connected by
 * hand. */
void hand_set_patience(struct soft_qp *qp);
void hand_close(struct soft_qp *qp);

#endif
