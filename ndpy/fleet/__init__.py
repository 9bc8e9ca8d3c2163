"""What `ndpy fleet` is made of: it measures the adapters of many machines, and names those that are unlike the others.

| file or folder | what it has |
| --- | --- |
| `results.py` | what is measured and found: ends, measurements, suspects, the report |
| `schedule.py` | which ends are partners in which round |
| `search.py` | the rounds that are chosen from what is known so far |
| `model.py` | what the measurements say about each end, node, leaf and path |
| `things.py` | what can be at fault, and which measurements speak of it |
| `evidence.py` | how sure that is: the mathematics of `model.py` |
| `topology.py` | which ends share a leaf, a rail, a node |
| `lldp.py` | what the switches of a machine are called |
| `engines/` | how the ranks are started and exchange words: MPI, ssh, a rendezvous |
| `measure.py` | what a rank measures, in a process for each adapter |
| `pair.py` | how two ends measure with each other |
| `flows.py` | how many ends write at the same time |
| `patterns.py` | which ones do so, and which receivers are slow then |
| `member.py` | what a rank does for rank 0 |
| `compare.py` | which machines are unlike the majority |
| `losses.py` | who alone counts lost and damaged packets |
| `coordinator.py` | what rank 0 does: it gives out work, collects results, and survives a rank that does not answer |
| `prolog.py` | one machine against those of a former report |
| `counting.py` | which counters grew in which round |
| `report/` | the report as text, JSON, HTML, JUnit and OpenMetrics |
"""
