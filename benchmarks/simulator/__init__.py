"""What would a deployment deliver that is larger than any at hand? Its rounds in simulated time, driven by what stages cost."""
