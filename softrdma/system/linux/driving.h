/* The program's own threads do the work of the workers while they wait for a completion. This saves two changes of threads
 * for each message.
 *
 * A worker leaves its sockets alone while somebody drives, and for DRIVE_MS after that. It then looks again. If one thread
 * waits for a long time, the workers sleep until that thread has what it waits for.
 */
#ifndef LINUX_DRIVING_H
#define LINUX_DRIVING_H

#include <stdbool.h>

/* Handles whatever has arrived for any socket. Does not wait. One thread at a time; for others it does nothing. */
void workers_drive(void);
/* The program that has driven is going to sleep: the workers handle what arrives from now on, at once. */
void workers_go_on(void);
/* Waits until the descriptor is readable, and drives meanwhile if no other thread does. Returns early for no reason, and with
 * EINTR in errno and false after a signal. Call it again until it is readable. */
bool workers_drive_until(int descriptor);

#endif
