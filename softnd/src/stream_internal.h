/* What stream.c and stream_io.c call in each other. Callers hold the stream's lock, except for stream_receive_all and
 * the callbacks. */
#ifndef SOFTND_STREAM_INTERNAL_H
#define SOFTND_STREAM_INTERNAL_H

#include "stream.h"

/* stream.c */
/* The peer sent its FIN (`error` is 0), or the connection is lost. */
void stream_connection_lost(struct stream *stream, DWORD error);
void stream_close_socket(struct stream *stream);

/* stream_io.c */
/* Handles buffered input as the phase requires. */
void stream_process(struct stream *stream);
void stream_receive_all(struct stream *stream);
void stream_send_done(struct io *io, DWORD error, DWORD bytes);
void stream_receive_done(struct io *io, DWORD error, DWORD bytes);
void stream_resume_done(struct io *io, DWORD error, DWORD bytes);

#endif
