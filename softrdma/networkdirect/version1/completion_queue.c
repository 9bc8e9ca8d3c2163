/* INDCompletionQueue: GetResults writes into the ND_RESULTs and gives out their pointers. */
#include "objects.h"

#define BATCH 32u

static HRESULT STDMETHODCALLTYPE cq1_resize(INDCompletionQueue *self, SIZE_T entries)
{
    return nd_cq_resize((IND2CompletionQueue *)self, version1_size(entries));
}

static ND_RESULT *write_result(const ND2_RESULT *from)
{
    ND_RESULT result = {.Status = from->Status, .BytesTransferred = from->BytesTransferred};

    /* A window's result was written when the peer invalidated the window. The window may be gone by now. If the memory
     * of a request's result is gone, the program gets only the pointer, which still identifies the request. */
    if (from->RequestType != REQUEST_PEER_INVALIDATED)
        guarded_copy(from->RequestContext, &result, sizeof result);
    return from->RequestContext;
}

static SIZE_T STDMETHODCALLTYPE cq1_results(INDCompletionQueue *self, ND_RESULT **results, SIZE_T count)
{
    static ND_RESULT *const none[BATCH];
    struct cq_entry batch[BATCH];
    SIZE_T given = 0;

    while (results != NULL && given < count) {
        ULONG wanted = count - given < BATCH ? (ULONG)(count - given) : BATCH;
        /* Entries leave the queue only if their pointers can be given out. */
        if (!guarded_copy(&results[given], none, wanted * sizeof *results))
            break;
        ULONG taken = cq_take(cq_of(self), batch, wanted);
        for (ULONG i = 0; i < taken; i++)
            results[given++] = write_result(&batch[i].result);
        if (taken < wanted)
            break;
    }
    if (given == 0)
        thread_yield();
    return given;
}

static const struct INDCompletionQueue_methods methods = {
    VERSION1_OVERLAPPED_METHODS(INDCompletionQueue, nd_cq_cancel),
    cq1_resize,
    VERSION2_METHOD(nd_cq_notify),
    cq1_results,
};

const struct object_view version1_completion_queue_view = {
    .methods = &methods,
    .iid = &softnd_iid_INDCompletionQueue,
    .base = &softnd_iid_INDOverlapped,
};
