"""A first program: an RDMA write into the memory of the peer. Here both ends are in one program.

python hello.py
"""

import ndpy

with ndpy.open_adapter() as adapter:
    target = bytearray(32)
    with (
        adapter.register(b"hello over RDMA", ndpy.Access.NONE) as source,
        adapter.register(target, ndpy.Access.REMOTE_WRITE) as region,
        adapter.create_completion_queue(16) as queue,
        adapter.create_queue_pair(queue) as near,
        adapter.create_queue_pair(queue) as far,
        adapter.listen(("", 0)) as listener,
        adapter.create_connector() as connector,
    ):
        # In two programs, one connects and completes, the other takes the request and accepts it.
        connecting = connector.begin_connect(near, (adapter.info.addresses[0], listener.address[1]))
        with listener.get_request(timeout_s=5) as request:
            accepting = request.begin_accept(far)
            connecting.result(timeout_s=5)
            connector.complete_connect(timeout_s=5)
            accepting.result(timeout_s=5)

            near.write(source, region.remote(), context=7)
            for completion in queue.wait(timeout_s=5):
                completion.raise_for_status()
                print(completion.operation.name, "with context", completion.context, "has ended")
            connector.disconnect(timeout_s=5)
    print(bytes(target).rstrip(b"\0").decode(), "on", adapter.info.name)
