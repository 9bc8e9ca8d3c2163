/* What stream.c, stream_io.c and upkeep.c call in each other. Callers hold the stream's lock, except for
 * stream_receive_all and the callbacks. */
#ifndef ENGINE_STREAM_INTERNAL_H
#define ENGINE_STREAM_INTERNAL_H

#include "stream.h"

/* stream.c */
/* The peer sent its FIN (`error` is ND_SUCCESS), or the connection is lost. */
void stream_connection_lost(struct stream *stream, nd_status error);
void stream_close_socket(struct stream *stream);
/* Calls act(), with the lock of a stream, for each that is open now. Without locks. */
void streams_each(void (*act)(struct stream *stream, void *what), void *what);

/* guests.c. From the connection on until the request has arrived, and again once it was refused. Nothing happens if it
 * is one already, or none. True: there are too many, and guests_limit() has to be called without locks. */
bool guest_enter(struct stream *stream);
void guest_leave(struct stream *stream);
/* Ends the oldest while there are too many. True: there are, but they have not had their time. */
bool guests_limit(void);
void guests_forget(void);

/* gathering.c. Whether what is filled waits for other requests. The stream does not send yet. */
bool stream_gathers(struct stream *stream);
void stream_gathers_no_more(struct stream *stream);
void gathering_forget(void);

/* stream_io.c */
/* Gives back the large buffers, unless one of them is in use. False: there are some left that can be given back later.
 */
bool stream_shrink(struct stream *stream);
/* Handles buffered input as the phase requires. */
void stream_process(struct stream *stream);
void stream_receive_all(struct stream *stream);
void stream_send_done(struct io *io, nd_status error, size_t bytes);
void stream_receive_done(struct io *io, nd_status error, size_t bytes);
void stream_resume_done(struct io *io, nd_status error, size_t bytes);

#endif
