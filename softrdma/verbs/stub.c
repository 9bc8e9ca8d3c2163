/* libibverbs.so.1 and librdmacm.so.1, under whose names programs load libsoftverbs.so.
 *
 * Both consist of version names and a dependency on libsoftverbs.so, which has the calls. The dynamic loader looks for
 * a program's versions here and for its calls in all libraries. So both names lead to one copy of all state.
 *
 * perftest and pyverbs also load drivers, libmlx5.so.1 for example. A driver needs calls that have the version of its
 * generation, and the loader refuses it without them. Here no driver finds a device of its own, so apart from the call
 * that registers it, it makes none of them.
 */
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef STUB_OF_IBVERBS

#define PRIVATE __attribute__((used)) static

/* Version 34 is the default because musl knows only defaults, and most distributions have it. */
#define OTHER_GENERATIONS "25, 33, 57, 59, 64, 65"
#define EXPORT_AS(object, name)                                                \
    __asm__(".globl " name "_34\n"                                             \
            ".set " name "_34, " object "\n"                                   \
            ".symver " name "_34, " name "@@IBVERBS_PRIVATE_34\n"              \
            ".irp version, " OTHER_GENERATIONS "\n"                            \
            ".globl " name "_\\version\n"                                      \
            ".set " name "_\\version, " object "\n"                            \
            ".symver " name "_\\version, " name "@IBVERBS_PRIVATE_\\version\n" \
            ".endr\n")

PRIVATE int unsupported(void)
{
    return errno = EOPNOTSUPP;
}

PRIVATE void *unsupported_pointer(void)
{
    errno = EOPNOTSUPP;
    return NULL;
}

PRIVATE void nothing(void) {}

/* The kernel gives this type to the GIDs of iWARP devices. Its text in /sys is "IB/RoCE v1". */
PRIVATE int gid_type(void *context, uint8_t port, unsigned index, int *type)
{
    (void)context;
    (void)index;
    if (port != 1) {
        errno = EINVAL;
        return -1;
    }
    *type = 0;
    return 0;
}

PRIVATE bool disassociate;

/* A driver calls this while it is loaded. The name has the version too. */
__asm__(".irp version, 34, " OTHER_GENERATIONS "\n"
        ".globl register_\\version\n"
        ".set register_\\version, nothing\n"
        ".symver register_\\version, verbs_register_driver_\\version@@IBVERBS_PRIVATE_\\version\n"
        ".endr\n");

EXPORT_AS("disassociate", "verbs_allow_disassociate_destroy");
EXPORT_AS("gid_type", "ibv_query_gid_type");
EXPORT_AS("nothing", "__verbs_log");
EXPORT_AS("nothing", "ibv_dmabuf_heap_destroy");
EXPORT_AS("nothing", "ibv_dmabuf_heap_free");
EXPORT_AS("nothing", "verbs_init_cq");
EXPORT_AS("nothing", "verbs_set_ops");
EXPORT_AS("nothing", "verbs_uninit_context");
EXPORT_AS("unsupported_pointer", "_verbs_init_and_alloc_context");
EXPORT_AS("unsupported_pointer", "ibv_dmabuf_heap_alloc");
EXPORT_AS("unsupported_pointer", "ibv_wr_opcode_str");
EXPORT_AS("unsupported_pointer", "verbs_open_device");
EXPORT_AS("unsupported", "__ioctl_final_num_attrs");
EXPORT_AS("unsupported", "execute_ioctl");
EXPORT_AS("unsupported", "ibv_dmabuf_heap_cc_shared_init");
EXPORT_AS("unsupported", "ibv_get_fw_ver");
EXPORT_AS("unsupported", "ibv_read_ibdev_sysfs_file");

/* The calls of a driver's commands, ibv_cmd_... */
#define COMMANDS                                                                                           \
    "advise_mr, alloc_dm, alloc_dmah, alloc_mw, alloc_pd, attach_mcast, close_xrcd, create_ah, "           \
    "create_comp_cntr, create_counters, create_cq, create_cq_ex, create_cq_ex2, create_flow, "             \
    "create_flow_action_esp, create_qp, create_qp_ex, create_qp_ex2, create_rwq_ind_table, create_srq, "   \
    "create_srq_ex, create_wq, dealloc_mw, dealloc_pd, dereg_mr, destroy_ah, destroy_comp_cntr, "          \
    "destroy_counters, destroy_cq, destroy_flow, destroy_flow_action, destroy_qp, destroy_rwq_ind_table, " \
    "destroy_srq, destroy_wq, detach_mcast, export_dmabuf_fd, free_dm, free_dmah, get_context, "           \
    "inc_comp_cntr, inc_err_comp_cntr, modify_cq, modify_flow_action_esp, modify_qp, modify_qp_ex, "       \
    "modify_srq, modify_wq, open_qp, open_xrcd, poll_cq, post_recv, post_send, post_srq_recv, "            \
    "qp_attach_comp_cntr, query_comp_cntr_caps, query_context, query_device, query_device_any, "           \
    "query_device_ex, query_mr, query_port, query_port_speed, query_qp, query_srq, read_comp_cntr, "       \
    "read_counters, read_err_comp_cntr, reg_dm_mr, reg_dmabuf_mr, reg_mr, reg_mr_ex, req_notify_cq, "      \
    "rereg_mr, resize_cq, set_comp_cntr, set_err_comp_cntr"
__asm__(".macro COMMAND_AS name, version, symbol\n"
        ".globl ibv_cmd_\\name\\()_\\version\n"
        ".set ibv_cmd_\\name\\()_\\version, unsupported\n"
        ".symver ibv_cmd_\\name\\()_\\version, ibv_cmd_\\name\\symbol\\()IBVERBS_PRIVATE_\\version\n"
        ".endm\n"
        ".irp name, " COMMANDS "\n"
        "COMMAND_AS \\name, 34, @@\n"
        ".irp version, " OTHER_GENERATIONS "\n"
        "COMMAND_AS \\name, \\version, @\n"
        ".endr\n"
        ".endr\n");

#endif
