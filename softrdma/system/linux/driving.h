/* The program's own threads do the work of the workers while they wait for a completion. This saves two changes of
 * threads for each message.
 *
 * A worker's gate is open whenever no such thread is inside a call of the library. So what comes while the program does
 * something else wakes the worker at once. A thread that has shown that it does this work again and again shuts the
 * gates as long as it is inside, and nobody is woken for what it handles.
 *
 * A thread that sleeps has claimed nothing that others need. It may be canceled, or leave by siglongjmp() in a handler.
 * If it had shut the gates, worker 0 opens them: it looks every NAP_MS while gates are used.
 */
#ifndef LINUX_DRIVING_H
#define LINUX_DRIVING_H

#include <signal.h>
#include <stdbool.h>

/* Blocks all signals but those that an instruction causes: blocked, these would end the process without asking a
 * handler. */
void signals_off(sigset_t *before);

/* Handles whatever has arrived for any socket. Does not wait. One thread at a time; for others it does nothing. */
void workers_drive(void);
/* The same for a program that looks for something again and again. If it does that in quick succession, this stays for
 * some microseconds, until `found` is true or something was handled. */
void workers_spin(bool (*found)(void *what), void *what);
/* The program found what it looks for without that. */
void workers_found(void);
/* This thread does something else now than to look again and again. */
void workers_begin_anew(void);
/* Waits until the descriptor is readable, and drives meanwhile if no other thread does. Returns early for no reason,
 * and with EINTR in errno and false after a signal. Call it again until it is readable. The thread has called
 * signals_off(), and `signals` are those that it blocks while it sleeps. */
bool workers_drive_until(int descriptor, const sigset_t *signals);

#endif
