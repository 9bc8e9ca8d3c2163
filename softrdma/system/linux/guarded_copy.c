/* A copy that fails instead of crashing if a page is missing.
 *
 * On x86-64 and aarch64, the copy is a routine whose address range is known. The handler of SIGSEGV and SIGBUS sees a
 * fault inside this range and continues the thread at the routine's failure exit. The routine keeps nothing on the
 * stack and changes only registers that a call may change, so that is safe at every instruction. The handler needs no
 * data of the thread. Elsewhere, and under AddressSanitizer, which must see the accesses, the handler jumps back with
 * siglongjmp. ThreadSanitizer must not see them: it has locks during an access.
 *
 * The last 64 bytes are stored in aligned pieces at ascending addresses, each after everything before it. x86 keeps
 * the order of such stores. On aarch64 they are store-releases.
 *
 * The handler may be installed several times over, each time above a handler that another library has put over it.
 * Each level has an entry point of its own. When such a library restores what it found, it restores the entry point of
 * the level below itself, and that one chains to what was there before. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "guarded.h"
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#define LEVELS 16

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

#if !defined(SANITIZED) && defined(__x86_64__) && defined(__LP64__)

#define PROGRAM_COUNTER(context) ((context)->uc_mcontext.gregs[REG_RIP])

/* bool guarded_copy(void *destination [rdi], const void *source [rsi], size_t size [rdx]) */
__asm__(".text\n"
        ".balign 16\n"
        ".hidden guarded_copy, guarded_copy_end, guarded_copy_failed\n"
        ".globl guarded_copy, guarded_copy_end, guarded_copy_failed\n"
        ".type guarded_copy, @function\n"
        "guarded_copy:\n"
        "    .cfi_startproc\n"
        "    cmpq $64, %rdx\n"
        "    jbe 2f\n"
        "1:  movups (%rsi), %xmm0\n"
        "    movups 16(%rsi), %xmm1\n"
        "    movups 32(%rsi), %xmm2\n"
        "    movups 48(%rsi), %xmm3\n"
        "    movups %xmm0, (%rdi)\n"
        "    movups %xmm1, 16(%rdi)\n"
        "    movups %xmm2, 32(%rdi)\n"
        "    movups %xmm3, 48(%rdi)\n"
        "    addq $64, %rsi\n"
        "    addq $64, %rdi\n"
        "    subq $64, %rdx\n"
        "    cmpq $64, %rdx\n"
        "    ja 1b\n"
        "2:  cmpq $8, %rdx\n"
        "    jb 5f\n"
        "3:  testb $7, %dil\n"
        "    jz 4f\n"
        "    movzbl (%rsi), %eax\n"
        "    movb %al, (%rdi)\n"
        "    incq %rsi\n"
        "    incq %rdi\n"
        "    decq %rdx\n"
        "    jmp 3b\n"
        "4:  cmpq $8, %rdx\n"
        "    jb 5f\n"
        "    movq (%rsi), %rax\n"
        "    movq %rax, (%rdi)\n"
        "    addq $8, %rsi\n"
        "    addq $8, %rdi\n"
        "    subq $8, %rdx\n"
        "    jmp 4b\n"
        "5:  testq %rdx, %rdx\n"
        "    jz 6f\n"
        "    movzbl (%rsi), %eax\n"
        "    movb %al, (%rdi)\n"
        "    incq %rsi\n"
        "    incq %rdi\n"
        "    decq %rdx\n"
        "    jmp 5b\n"
        "6:  movl $1, %eax\n"
        "    ret\n"
        "guarded_copy_end:\n"
        "guarded_copy_failed:\n"
        "    xorl %eax, %eax\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size guarded_copy, . - guarded_copy\n");

#elif !defined(SANITIZED) && defined(__aarch64__) && defined(__LP64__)

#define PROGRAM_COUNTER(context) ((context)->uc_mcontext.pc)

/* bool guarded_copy(void *destination [x0], const void *source [x1], size_t size [x2]) */
__asm__(".text\n"
        ".balign 16\n"
        ".hidden guarded_copy, guarded_copy_end, guarded_copy_failed\n"
        ".globl guarded_copy, guarded_copy_end, guarded_copy_failed\n"
        ".type guarded_copy, %function\n"
        "guarded_copy:\n"
        "    .cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    cmp x2, #64\n"
        "    b.ls 2f\n"
        "1:  ldp q0, q1, [x1]\n"
        "    ldp q2, q3, [x1, #32]\n"
        "    stp q0, q1, [x0]\n"
        "    stp q2, q3, [x0, #32]\n"
        "    add x1, x1, #64\n"
        "    add x0, x0, #64\n"
        "    sub x2, x2, #64\n"
        "    cmp x2, #64\n"
        "    b.hi 1b\n"
        "2:  cmp x2, #8\n"
        "    b.lo 5f\n"
        "3:  tst x0, #7\n"
        "    b.eq 4f\n"
        "    ldrb w3, [x1], #1\n"
        "    stlrb w3, [x0]\n"
        "    add x0, x0, #1\n"
        "    sub x2, x2, #1\n"
        "    b 3b\n"
        "4:  cmp x2, #8\n"
        "    b.lo 5f\n"
        "    ldr x3, [x1], #8\n"
        "    stlr x3, [x0]\n"
        "    add x0, x0, #8\n"
        "    sub x2, x2, #8\n"
        "    b 4b\n"
        "5:  cbz x2, 6f\n"
        "    ldrb w3, [x1], #1\n"
        "    stlrb w3, [x0]\n"
        "    add x0, x0, #1\n"
        "    sub x2, x2, #1\n"
        "    b 5b\n"
        "6:  mov w0, #1\n"
        "    ret\n"
        "guarded_copy_end:\n"
        "guarded_copy_failed:\n"
        "    mov w0, #0\n"
        "    ret\n"
        "    .cfi_endproc\n"
        ".size guarded_copy, . - guarded_copy\n");

#endif

#ifdef PROGRAM_COUNTER

extern const char guarded_copy_end[], guarded_copy_failed[];

static bool copy_start(void)
{
    return true;
}

static bool copy_ends(ucontext_t *context)
{
    uintptr_t at = (uintptr_t)PROGRAM_COUNTER(context);

    if (at < (uintptr_t)guarded_copy || at >= (uintptr_t)guarded_copy_end)
        return false;
    PROGRAM_COUNTER(context) = (__typeof__(PROGRAM_COUNTER(context)))(uintptr_t)guarded_copy_failed;
    return true;
}

#else

#include <pthread.h>
#include <setjmp.h>

/* Where a fault of this thread leads, or NULL. A handler may read such a value; a thread-local variable might have to
 * be allocated first. */
static pthread_key_t resume_key;
static pthread_once_t resume_once = PTHREAD_ONCE_INIT;
static bool resume_ready;

static void make_key(void)
{
    resume_ready = pthread_key_create(&resume_key, NULL) == 0;
}

static bool copy_start(void)
{
    pthread_once(&resume_once, make_key);
    return resume_ready;
}

static bool copy_ends(ucontext_t *context)
{
    sigjmp_buf *resume = resume_ready ? pthread_getspecific(resume_key) : NULL;

    if (resume == NULL)
        return false;
    pthread_setspecific(resume_key, NULL);
    pthread_sigmask(SIG_SETMASK, &context->uc_sigmask, NULL);
    siglongjmp(*resume, 1);
}

/* The consumer's addresses may be anything, NULL too. */
__attribute__((no_sanitize("undefined"))) static void copy(char *to, const char *from, size_t size)
{
    if (size > 64) {
        size_t front = size - 64;
        memcpy(to, from, front);
        to += front;
        from += front;
        size = 64;
    }
    while (size >= 8 && ((uintptr_t)to & 7) == 0) {
        uint64_t word;
        memcpy(&word, from, 8);
        __atomic_store_n((uint64_t *)(void *)to, word, __ATOMIC_RELEASE);
        to += 8;
        from += 8;
        size -= 8;
    }
    for (; size > 0; size--)
        __atomic_store_n(to++, *from++, __ATOMIC_RELEASE);
}

bool guarded_copy(void *destination, const void *source, size_t size)
{
    sigjmp_buf resume;

    if (sigsetjmp(resume, 0) != 0)
        return false;
    pthread_setspecific(resume_key, &resume);
    copy(destination, source, size);
    pthread_setspecific(resume_key, NULL);
    return true;
}

#endif

/* ---- The handler ---- */

static const int numbers[] = {SIGSEGV, SIGBUS};
#define NUMBERS 2

static struct sigaction chained[NUMBERS][LEVELS];
static _Atomic int top[NUMBERS]; /* the level that was installed when this was last looked at */
static struct lock install_lock = LOCK_INIT;
static _Atomic bool started;

static void reset(struct sigaction *action)
{
    memset(action, 0, sizeof *action);
    action->sa_handler = SIG_DFL;
}

/* Does what the kernel would do for the other handler. It runs with its own signal mask already. */
static void chain(struct sigaction *to, int number, siginfo_t *info, void *context)
{
    struct sigaction action = *to;
    bool sent = info->si_code <= 0;

    if ((action.sa_flags & SA_SIGINFO) == 0 && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)) {
        if (sent && action.sa_handler == SIG_IGN)
            return;
        /* The instruction faults again, with the right core. A signal that no instruction causes is raised. */
        reset(&action);
        sigaction(number, &action, NULL);
        if (sent || (number == SIGBUS && info->si_code == BUS_MCEERR_AO))
            raise(number);
        return;
    }
    if ((action.sa_flags & (int)SA_RESETHAND) != 0)
        reset(to);
    if ((action.sa_flags & SA_SIGINFO) != 0)
        action.sa_sigaction(number, info, context);
    else
        action.sa_handler(number);
}

static void on_fault(int level, int number, siginfo_t *info, void *context)
{
    int error = errno;

    if (info->si_code <= 0 || !copy_ends(context))
        chain(&chained[number == SIGBUS][level], number, info, context);
    errno = error;
}

#define ENTRY(level)                                                         \
    static void on_fault_##level(int number, siginfo_t *info, void *context) \
    {                                                                        \
        on_fault(level, number, info, context);                              \
    }
/* clang-format off */
ENTRY(0) ENTRY(1) ENTRY(2) ENTRY(3) ENTRY(4) ENTRY(5) ENTRY(6) ENTRY(7)
ENTRY(8) ENTRY(9) ENTRY(10) ENTRY(11) ENTRY(12) ENTRY(13) ENTRY(14) ENTRY(15)
/* clang-format on */

static void (*const entries[LEVELS])(int, siginfo_t *, void *) = {
    on_fault_0, on_fault_1, on_fault_2,  on_fault_3,  on_fault_4,  on_fault_5,  on_fault_6,  on_fault_7,
    on_fault_8, on_fault_9, on_fault_10, on_fault_11, on_fault_12, on_fault_13, on_fault_14, on_fault_15,
};

/* The level of one of our own actions, otherwise -1. */
static int level_of(const struct sigaction *action)
{
    if ((action->sa_flags & SA_SIGINFO) == 0)
        return -1;
    for (int i = 0; i < LEVELS; i++)
        if (action->sa_sigaction == entries[i])
            return i;
    return -1;
}

/* The level for a handler above `found`. If that one was there before, its old level: then it found the same below. */
static int level_above(int which, const struct sigaction *found)
{
    int highest = atomic_load(&top[which]);

    for (int i = highest; i >= 0; i--)
        if (chained[which][i].sa_handler == found->sa_handler)
            return i;
    return highest + 1 < LEVELS ? highest + 1 : LEVELS - 1;
}

static bool install(int which)
{
    struct sigaction found, action;

    if (sigaction(numbers[which], NULL, &found) != 0 || level_of(&found) >= 0)
        return true;
    int level = level_above(which, &found);
    memset(&action, 0, sizeof action);
    action.sa_sigaction = entries[level];
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | (found.sa_flags & (SA_RESTART | SA_NODEFER));
    action.sa_mask = found.sa_mask;
    chained[which][level] = found;
    atomic_store(&top[which], level);
    return sigaction(numbers[which], &action, NULL) == 0;
}

/* Costs two system calls. */
static void look_at_handlers(void)
{
    for (int i = 0; i < NUMBERS; i++) {
        struct sigaction found;
        if (!atomic_load_explicit(&started, memory_order_acquire) || sigaction(numbers[i], NULL, &found) != 0)
            continue;
        int level = level_of(&found);
        if (level >= 0) {
            if (atomic_load_explicit(&top[i], memory_order_relaxed) != level)
                atomic_store_explicit(&top[i], level, memory_order_relaxed);
            continue;
        }
        lock_acquire(&install_lock);
        install(i);
        lock_release(&install_lock);
    }
}

void guarded_copy_refresh(void)
{
    static _Atomic uint64_t last;
    struct timespec now = {0};

    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    uint64_t tick = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (atomic_load_explicit(&last, memory_order_relaxed) == tick)
        return;
    atomic_store_explicit(&last, tick, memory_order_relaxed);
    look_at_handlers();
}

bool guarded_copy_start(void)
{
    bool done = copy_start();

    lock_acquire(&install_lock);
    for (int i = 0; i < NUMBERS && done; i++) {
        if (!atomic_load(&started))
            atomic_store(&top[i], -1);
        done = install(i);
    }
    atomic_store(&started, done);
    lock_release(&install_lock);
    return done;
}

void guarded_copy_forget(void)
{
    lock_start(&install_lock);
}

/* Leaves another library's handler in place, and with it the way to ours. So the code must stay in memory. */
void guarded_copy_stop(void)
{
    lock_acquire(&install_lock);
    for (int i = 0; i < NUMBERS && atomic_load(&started); i++) {
        struct sigaction found;
        int level = sigaction(numbers[i], NULL, &found) == 0 ? level_of(&found) : -1;
        if (level >= 0)
            sigaction(numbers[i], &chained[i][level], NULL);
    }
    atomic_store(&started, false);
    lock_release(&install_lock);
}
