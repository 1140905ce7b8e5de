"""From a central model to asynchronous learning on people's own data: the price of each step.

R. Gajanin, A. Danilenka, A. Morichetta, S. Nastic. Towards Adaptive Asynchronous Federated
Learning for Human Activity Recognition. IoT 2024.
"""
