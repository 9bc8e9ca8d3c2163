/* One end of a connection, for tests that play its peer and its program. */
#ifndef FUZZ_ENDS_H
#define FUZZ_ENDS_H

#include "completion_queue.h"
#include "face_of_tests.h"
#include "queue_pair.h"
#include "world.h"

#define DEPTH 16u

extern struct adapter *adapter;

/* One end of a connection. The other one is fed and read by the test. */
struct end {
    struct stream *stream;
    struct completion_queue *cq;
    struct queue_pair *qp;
    socket_handle socket;
    uint32_t msn;      /* of the peer's next message */
    unsigned answered; /* Reads that the peer has answered */
};

/* What the program asks for, and what the peer agrees to. */
struct read_limits {
    uint16_t outbound, peer_inbound;
};

struct reads {
    unsigned all, of_program;        /* Read Requests that this end has sent; those of more than no bytes */
    struct wire_read_request oldest; /* that is not answered; valid if there is one */
};

extern const struct read_limits usual_limits;
/* Regions of the test's requests. */
extern struct region *kept[2 * DEPTH];
extern unsigned kept_count;

struct shared_queue *new_shared_queue(void);
struct end connected_with(struct shared_queue *srq, struct read_limits read_limits);
struct end connected(struct shared_queue *srq);
void end_connection(struct end *end);
void message_arrives(struct end *end, uint32_t size);
void tell(struct end *end, uint32_t token, uint64_t what);
void disconnect(struct end *end);
uint32_t completed(struct end *end, nd_status status);
void receive(struct end *end);
void send_nothing(struct end *end);
struct reads reads_sent(const struct end *end);
void answer_read(struct end *end);
void read_byte(struct end *end, uint32_t flags);

#endif
