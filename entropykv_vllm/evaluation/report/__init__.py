# SPDX-License-Identifier: Apache-2.0
"""`entropykv report`: everything that docs/quality.md says, measured and put into its tables."""
