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

#define COMMAND(name) EXPORT_AS("unsupported", "ibv_cmd_" #name)

COMMAND(advise_mr);
COMMAND(alloc_dm);
COMMAND(alloc_dmah);
COMMAND(alloc_mw);
COMMAND(alloc_pd);
COMMAND(attach_mcast);
COMMAND(close_xrcd);
COMMAND(create_ah);
COMMAND(create_comp_cntr);
COMMAND(create_counters);
COMMAND(create_cq);
COMMAND(create_cq_ex);
COMMAND(create_cq_ex2);
COMMAND(create_flow);
COMMAND(create_flow_action_esp);
COMMAND(create_qp);
COMMAND(create_qp_ex);
COMMAND(create_qp_ex2);
COMMAND(create_rwq_ind_table);
COMMAND(create_srq);
COMMAND(create_srq_ex);
COMMAND(create_wq);
COMMAND(dealloc_mw);
COMMAND(dealloc_pd);
COMMAND(dereg_mr);
COMMAND(destroy_ah);
COMMAND(destroy_comp_cntr);
COMMAND(destroy_counters);
COMMAND(destroy_cq);
COMMAND(destroy_flow);
COMMAND(destroy_flow_action);
COMMAND(destroy_qp);
COMMAND(destroy_rwq_ind_table);
COMMAND(destroy_srq);
COMMAND(destroy_wq);
COMMAND(detach_mcast);
COMMAND(export_dmabuf_fd);
COMMAND(free_dm);
COMMAND(free_dmah);
COMMAND(get_context);
COMMAND(inc_comp_cntr);
COMMAND(inc_err_comp_cntr);
COMMAND(modify_cq);
COMMAND(modify_flow_action_esp);
COMMAND(modify_qp);
COMMAND(modify_qp_ex);
COMMAND(modify_srq);
COMMAND(modify_wq);
COMMAND(open_qp);
COMMAND(open_xrcd);
COMMAND(poll_cq);
COMMAND(post_recv);
COMMAND(post_send);
COMMAND(post_srq_recv);
COMMAND(qp_attach_comp_cntr);
COMMAND(query_comp_cntr_caps);
COMMAND(query_context);
COMMAND(query_device);
COMMAND(query_device_any);
COMMAND(query_device_ex);
COMMAND(query_mr);
COMMAND(query_port);
COMMAND(query_port_speed);
COMMAND(query_qp);
COMMAND(query_srq);
COMMAND(read_comp_cntr);
COMMAND(read_counters);
COMMAND(read_err_comp_cntr);
COMMAND(reg_dm_mr);
COMMAND(reg_dmabuf_mr);
COMMAND(reg_mr);
COMMAND(reg_mr_ex);
COMMAND(req_notify_cq);
COMMAND(rereg_mr);
COMMAND(resize_cq);
COMMAND(set_comp_cntr);
COMMAND(set_err_comp_cntr);

#endif
