/* Sends postcards and prints the answers: postcard ADDRESS PORT TEXT...  What a card is stands in postcard.py. */

#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER = 8, SIZE = 1024 };

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static uint32_t crc32(const unsigned char *bytes, size_t length)
{
    uint32_t sum = ~0u;

    while (length--) {
        sum ^= *bytes++;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
    }
    return ~sum;
}

static size_t pack(unsigned char *card, uint32_t taken, const char *text)
{
    size_t length = strnlen(text, SIZE - HEADER);
    uint32_t word = htonl(taken);

    memcpy(card + 4, &word, 4);
    memcpy(card + HEADER, text, length);
    word = htonl(crc32(card + 4, 4 + length));
    memcpy(card, &word, 4);
    return HEADER + length;
}

static void print_text(const unsigned char *card, size_t length)
{
    uint32_t word;

    memcpy(&word, card, 4);
    if (length < HEADER || ntohl(word) != crc32(card + 4, length - 4)) {
        fprintf(stderr, "a card of %zu bytes has a wrong checksum\n", length);
        exit(1);
    }
    printf("%.*s\n", (int)(length - HEADER), card + HEADER);
}

static void complete(const char *what, int count, const struct ibv_wc *result)
{
    if (count < 0)
        fail(what);
    if (result->status != IBV_WC_SUCCESS) {
        fprintf(stderr, "%s: %s\n", what, ibv_wc_status_str(result->status));
        exit(1);
    }
}

int main(int count, char **words)
{
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *address;
    struct ibv_qp_init_attr depths = {.cap = {1, 1, 1, 1, 0}, .sq_sig_all = 1};
    static unsigned char in[SIZE], out[SIZE];
    struct rdma_cm_id *id;
    struct ibv_mr *in_region, *out_region;
    struct ibv_wc result;

    if (count < 4) {
        fprintf(stderr, "usage: postcard ADDRESS PORT TEXT...\n");
        return 2;
    }
    if (rdma_getaddrinfo(words[1], words[2], &hints, &address) || rdma_create_ep(&id, address, NULL, &depths))
        fail("no way to this address");
    in_region = rdma_reg_msgs(id, in, SIZE);
    out_region = rdma_reg_msgs(id, out, SIZE);
    /* The answer of the first card needs memory before it can come. */
    if (!in_region || !out_region || rdma_post_recv(id, NULL, in, SIZE, in_region) || rdma_connect(id, NULL))
        fail("connecting");
    for (int i = 3; i < count; i++) {
        if (rdma_post_send(id, NULL, out, pack(out, i - 3, words[i]), out_region, 0))
            fail("sending");
        complete("sending", rdma_get_send_comp(id, &result), &result);
        complete("receiving", rdma_get_recv_comp(id, &result), &result);
        print_text(in, result.byte_len);
        if (i + 1 < count && rdma_post_recv(id, NULL, in, SIZE, in_region))
            fail("receiving");
    }
    rdma_disconnect(id);
    rdma_dereg_mr(in_region);
    rdma_dereg_mr(out_region);
    rdma_destroy_ep(id);
    rdma_freeaddrinfo(address);
    return 0;
}
