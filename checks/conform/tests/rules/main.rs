//! Every rule on a probe (dtypes and shapes), against differences (first and second derivatives), and what it keeps.

mod cases;
mod differences;
mod eager;
mod saves;
mod shapes;
