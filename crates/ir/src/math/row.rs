//! The tables' value column, expanded here and nowhere else: an operation's row becomes a type, and whoever asked for
//! it gets that type and applies it, loops over it or writes it down. So an operation is chosen once, outside the loop.

use super::{Bits, Compare, Float, Num};
use crate::{Binary, Unary};

/// The value of a one-operand row. A method rather than a closure, because only that can be told to be inlined always.
pub trait One<T, R> {
    /// Its value at `x`.
    fn value(x: T) -> R;
}

/// The value of a two-operand row.
pub trait Two<T, R> {
    /// Its value at `a` and `b`.
    fn value(a: T, b: T) -> R;
}

/// What is done with a one-operand row.
pub trait WithOne<T, R> {
    /// What comes of it.
    type Result;
    /// Does it with the row `V`.
    fn with<V: One<T, R>>(self) -> Self::Result;
}

/// What is done with a two-operand row.
pub trait WithTwo<T, R> {
    /// What comes of it.
    type Result;
    /// Does it with the row `V`.
    fn with<V: Two<T, R>>(self) -> Self::Result;
}

/// The block where the operation is of the wanted domain, else `None`.
macro_rules! in_domain {
    (Float Float $body:block) => {
        Some($body)
    };
    (Num Num $body:block) => {
        Some($body)
    };
    (Bits Bits $body:block) => {
        Some($body)
    };
    (Test Test $body:block) => {
        Some($body)
    };
    (Compare Compare $body:block) => {
        Some($body)
    };
    ($want:ident $domain:ident $body:block) => {
        None
    };
}

macro_rules! unary_rows {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$x:ident| $value:expr, $($more:tt)* })*) => {
        unary_rows! { @one unary_float Float Float [T] $($variant $domain $x [$value])* }
        unary_rows! { @one unary_num Num Num [T] $($variant $domain $x [$value])* }
        unary_rows! { @one unary_test Test Num [T::Truth] $($variant $domain $x [$value])* }
        unary_rows! { @one unary_bits Bits Bits [T] $($variant $domain $x [$value])* }
    };
    (@one $function:ident $want:ident $bound:ident [$result:ty] $($variant:ident $domain:ident $x:ident [$value:expr])*) => {
        /// The row of an operation of this domain; `None` for every other operation.
        #[inline(always)]
        pub fn $function<T: $bound, W: WithOne<T, $result>>(op: Unary, with: W) -> Option<W::Result> {
            match op { $(Unary::$variant => in_domain!($want $domain {
                struct Row;
                impl<T: $bound> One<T, $result> for Row {
                    #[inline(always)]
                    fn value($x: T) -> $result { $value }
                }
                with.with::<Row>()
            }),)* }
        }
    };
}
unary_table!(unary_rows);

macro_rules! binary_rows {
    ($($variant:ident $name:ident $doc:literal { domain: $domain:ident, value: |$a:ident, $b:ident| $value:expr, $($more:tt)* })*) => {
        binary_rows! { @one binary_float Float Float [T] $($variant $domain $a $b [$value])* }
        binary_rows! { @one binary_num Num Num [T] $($variant $domain $a $b [$value])* }
        binary_rows! { @one binary_compare Compare Compare [T::Truth] $($variant $domain $a $b [$value])* }
        binary_rows! { @one binary_bits Bits Bits [T] $($variant $domain $a $b [$value])* }
    };
    (@one $function:ident $want:ident $bound:ident [$result:ty] $($variant:ident $domain:ident $a:ident $b:ident [$value:expr])*) => {
        /// The row of an operation of this domain; `None` for every other operation.
        #[inline(always)]
        pub fn $function<T: $bound, W: WithTwo<T, $result>>(op: Binary, with: W) -> Option<W::Result> {
            match op { $(Binary::$variant => in_domain!($want $domain {
                struct Row;
                impl<T: $bound> Two<T, $result> for Row {
                    #[inline(always)]
                    fn value($a: T, $b: T) -> $result { $value }
                }
                with.with::<Row>()
            }),)* }
        }
    };
}
binary_table!(binary_rows);
