/* A face that only counts. */
#ifndef FUZZ_FACE_OF_TESTS_H
#define FUZZ_FACE_OF_TESTS_H

#include "adapter.h"
#include "face.h"

/* Calls of face_notified(). */
extern unsigned face_notifications;
/* What face_window_invalidated() returns. */
extern void *face_invalidation;
extern const struct object_class face_adapter_class;

#endif
