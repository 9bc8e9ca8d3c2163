/* Connections that programs make with ibv_modify_qp().
 *
 * A GID and a number, which programs exchange by their own means, say where the peer's queue pair is (numbers.h). Both
 * ends know both numbers and GIDs. The end whose pair of them is smaller connects, the other one accepts. The start-up
 * frame carries what the peer proves itself by (greeting.h).
 */
#ifndef SOFTVERBS_PAIRING_H
#define SOFTVERBS_PAIRING_H

#include "soft.h"

/* Whether these attributes name a peer. rdma_init_qp_attr() gives a GID and a number of zeros. */
bool pairing_names_a_peer(const struct ibv_qp_attr *attributes);
/* Whether they name a peer without its GID, which could not be found. */
bool pairing_names_nobody(const struct ibv_qp_attr *attributes);
/* Whether the peer can be connected to. 0, or an errno. Under the queue pair's lock. */
int pairing_check(struct soft_qp *qp);
/* Begins to connect or to wait for the peer. It goes on in the background until pairing_close(). */
void pairing_connect(struct soft_qp *qp);
/* These four do nothing for a queue pair that has no pairing.
 *
 * The queue pair may send: its PSN is known. */
void pairing_ready(struct soft_qp *qp);
/* The queue pair's retry time has changed. */
void pairing_set_patience(struct soft_qp *qp);
/* The queue pair is in the error state. Its peer is neither looked for nor let in any more. */
void pairing_stop(struct soft_qp *qp);
void pairing_close(struct soft_qp *qp);

#endif
