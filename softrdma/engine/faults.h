/* The engine as the executor of a scenario (../faults/scenario.h): what it asks, and what it does then.
 *
 * Adapters, queue pairs and streams have a pointer, which is NULL without a scenario. Only that is tested on the way of
 * requests. A scenario stays in use until the library ends, so that its counts go on when a program opens the adapter
 * again.
 *
 * What each fault is here:
 *
 * - A status: the request fails when its turn comes, as one does whose memory is gone. Nothing of it is sent, the peer
 *   gets a Terminate once what came before is done, and the rest is flushed (RFC 5040, section 7; IBTA 1.4, 10.3.1.5).
 *   REM_ACCESS_ERR is brought about: the peer gets a token that it never gave, and refuses it. RETRY_EXC_ERR: the
 *   connection is lost, without a word to the peer. A Receive fails when its message has arrived, and the peer is told
 *   what it would be told.
 * - delay, hold, silent: the request is carried out, and its completion is late, missing until the queue pair ends, or
 *   wakes nobody. Later completions of the same queue wait for it, because they are in order (IBTA 1.4, 10.8.5).
 * - late_receive: the peer's message finds no Receive (RNR).
 * - A message is late, comes in pieces of the MTU of 4,096 bytes with pauses, or has one wrong byte, which is in its
 *   first segment. A Read's message is the answer.
 * - mute: this end sends nothing more. After 10 s in which a request waits the connection is lost, as from a host that
 *   is silent. With port_down no connection sends, nor handles what comes, until port_up.
 */
#ifndef ENGINE_FAULTS_H
#define ENGINE_FAULTS_H

#include "../faults/scenario.h"
#include "vocabulary.h"
#include "system.h"

struct adapter;
struct faults;
struct operation;
struct queue_pair;
struct stream;

/* The scenario that NDPY_FAULTS names; NULL: none. ND_INVALID_PARAMETER: it cannot be used, and stderr says why. */
nd_status faults_use(struct faults **out);
/* NDPY_FAULTS may be another one by now: then the adapter has that scenario, also its objects, and is neither removed
 * nor is its port down. Programs that test themselves change it between two tests. */
nd_status faults_follow(struct adapter *adapter);
/* The library is unloaded. */
void faults_end(void);
/* The number of a queue pair that is created. */
uint32_t faults_number_queue_pair(struct faults *faults);

/* The fault that fires at a place of the face: a call. */
const struct fault *faults_ask(struct faults *faults, const struct place *place);
/* Of a request of the initiator that is about to begin. */
const struct fault *faults_at_request(struct queue_pair *queue_pair, struct stream *stream,
                                      const struct operation *operation, const void *content, size_t size);
const struct fault *faults_at_message(struct queue_pair *queue_pair, struct stream *stream,
                                      const struct operation *operation, const void *content, size_t size);
/* Changes a byte of a message that is to be corrupt. */
void faults_corrupt(const struct queue_pair *queue_pair, const struct fault *fault, uint8_t *data, size_t size);
/* Of a message that begins to arrive (late_receive), and of one that has arrived. */
const struct fault *faults_at_arrival(struct queue_pair *queue_pair, struct stream *stream, uint64_t size,
                                      const void *content, size_t content_size);
const struct fault *faults_at_receive(struct queue_pair *queue_pair, struct stream *stream, uint64_t size,
                                      const void *content, size_t content_size);
/* Of an attempt to connect. A passive one can only lose what comes of it. */
const struct fault *faults_at_connection(struct queue_pair *queue_pair, const struct stream *stream, bool passive);

/* How a request ends that has this status. */
struct failure {
    nd_status status;
    int terminate; /* as if the peer had refused it with this error */
};
struct failure fault_failure(const struct fault *fault, ND2_REQUEST_TYPE type);

/* Counts a request at the adapter, and does what happens there. `queue_pair` may be NULL. Without locks. */
void faults_at_adapter(struct adapter *adapter, struct queue_pair *queue_pair);
/* Starts and stops the faults that happen at a time. */
void faults_start_timed(struct adapter *adapter);
void faults_stop_timed(struct adapter *adapter);

#endif
