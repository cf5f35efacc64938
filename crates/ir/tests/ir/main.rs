//! Properties of the waist over arbitrary operations: inference survives anything, every written form reads back, and
//! no bytes can make a reader panic or allocate at will.

mod any;
mod forms;
mod hostile;
mod infer;
mod tables;
