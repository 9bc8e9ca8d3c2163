/* A copy that fails instead of crashing if a page is missing.
 *
 * MSVC has __try for this. MinGW has no structured exception handling in C. There the copy is a routine whose address
 * range is known. A vectored exception handler sees an access violation inside this range and continues the thread at
 * the routine's failure exit. The routine keeps nothing on the stack and changes only volatile registers, so that is
 * safe at every instruction.
 *
 * The copy stores at most 16 bytes at a time, at ascending addresses. x86 makes such stores visible in program order.
 * String instructions and memcpy do not promise that.
 */
#include "system.h"

#if defined(__GNUC__)

/* bool guarded_copy(void *destination [rcx], const void *source [rdx], size_t size [r8]) */
extern const char guarded_copy_end[], guarded_copy_failed[];

__asm__(".text\n"
        ".balign 16\n"
        ".globl guarded_copy\n"
        "guarded_copy:\n"
        "    cmpq $64, %r8\n"
        "    jb 2f\n"
        "1:  movups (%rdx), %xmm0\n"
        "    movups 16(%rdx), %xmm1\n"
        "    movups 32(%rdx), %xmm2\n"
        "    movups 48(%rdx), %xmm3\n"
        "    movups %xmm0, (%rcx)\n"
        "    movups %xmm1, 16(%rcx)\n"
        "    movups %xmm2, 32(%rcx)\n"
        "    movups %xmm3, 48(%rcx)\n"
        "    addq $64, %rdx\n"
        "    addq $64, %rcx\n"
        "    subq $64, %r8\n"
        "    cmpq $64, %r8\n"
        "    jae 1b\n"
        "2:  cmpq $8, %r8\n"
        "    jb 3f\n"
        "    movq (%rdx), %rax\n"
        "    movq %rax, (%rcx)\n"
        "    addq $8, %rdx\n"
        "    addq $8, %rcx\n"
        "    subq $8, %r8\n"
        "    jmp 2b\n"
        "3:  testq %r8, %r8\n"
        "    jz 4f\n"
        "    movb (%rdx), %al\n"
        "    movb %al, (%rcx)\n"
        "    incq %rdx\n"
        "    incq %rcx\n"
        "    decq %r8\n"
        "    jmp 3b\n"
        "4:  movl $1, %eax\n"
        "    ret\n"
        "guarded_copy_end:\n"
        "guarded_copy_failed:\n"
        "    xorl %eax, %eax\n"
        "    ret\n");

static void *handler;

static LONG CALLBACK on_exception(EXCEPTION_POINTERS *information)
{
    CONTEXT *context = information->ContextRecord;
    DWORD code = information->ExceptionRecord->ExceptionCode;

    if (context->Rip < (uintptr_t)guarded_copy || context->Rip >= (uintptr_t)guarded_copy_end)
        return EXCEPTION_CONTINUE_SEARCH;
    if (code != EXCEPTION_ACCESS_VIOLATION && code != EXCEPTION_IN_PAGE_ERROR && code != EXCEPTION_GUARD_PAGE)
        return EXCEPTION_CONTINUE_SEARCH;
    context->Rip = (uintptr_t)guarded_copy_failed;
    return EXCEPTION_CONTINUE_EXECUTION;
}

bool guarded_copy_start(void)
{
    handler = AddVectoredExceptionHandler(1, on_exception);
    return handler != NULL;
}

void guarded_copy_stop(void)
{
    RemoveVectoredExceptionHandler(handler);
}

#else

#include <emmintrin.h>

bool guarded_copy_start(void)
{
    return true;
}

void guarded_copy_stop(void) {}

bool guarded_copy(void *destination, const void *source, size_t size)
{
    volatile char *to = destination;
    const char *from = source;

    __try {
        for (; size >= 16; size -= 16, to += 16, from += 16)
            _mm_storeu_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
        for (; size > 0; size--)
            *to++ = *from++;
    } __except (EXCEPTION_EXECUTE_HANDLER) {
        return false;
    }
    return true;
}

#endif
