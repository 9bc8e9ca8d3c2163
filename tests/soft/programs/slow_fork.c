/* A library for a process that forks, in which other threads get far before a fork is done: begin() has it wait among
 * the handlers of pthread_atfork(3), before those that were registered earlier and after those that will be later.
 */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define WAIT_US 20000

static void wait_here(void)
{
    usleep(WAIT_US);
}

int begin(void)
{
    return pthread_atfork(wait_here, NULL, NULL);
}

/* A child that ends at once. Returns 0 if all is well. */
int fork_once(void)
{
    int status;
    pid_t child = fork();

    if (child == 0)
        _exit(0);
    return child < 0 || waitpid(child, &status, 0) != child || status != 0;
}
