"""What runs on top of the public interface: the commands, the doctor, and machines with software adapters."""
