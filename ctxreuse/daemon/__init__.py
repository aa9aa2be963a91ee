"""What the edge daemon and the cloud sidecar share: logs, probes, life cycle, and the words of OpenAI's interface."""
