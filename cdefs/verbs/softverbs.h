/* What softverbs exports besides the functions of libibverbs and librdmacm; see ibverbs.h. */

struct sockaddr_storage;

/* The addresses of soft0. Returns how many there are, which may be more than `count`. */
int softverbs_addresses(struct sockaddr_storage *out, int count); /* optional */
