//! The suite: every operation on a device, compared with the plain interpreter. It walks the tables by itself, so that
//! a line added there is tested everywhere; a new class of operation does not compile without cases (`cases.rs`).
//!
//! In: any [`Driver`], at its seam (write, submit, read). Out: a [`Finding`] for everything that differs. A case runs
//! with its operands row-major and as views that moves in the same batch make, with frees at the earliest place. Then
//! come what the rules of derivatives emit (`derivatives.rs`; the rules themselves are checked against differences in
//! `kiln-grad`), text and wire forms (`forms.rs`), failures (`failures.rs`) and frees (`frees.rs`).

mod cases;
mod seam;
mod trace;
mod values;

mod derivatives;
mod failures;
mod forms;
mod frees;

use kiln_device::{Driver, Error, Memory};
use kiln_ir::{Class, DType, Meta, Op};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Runs the whole suite; the device must give the interpreter's bits.
///
/// ```
/// let device = std::sync::Arc::new(kiln_cpu::Reference::start());
/// let totals = kiln_conform::suite::check(device, &mut |finding| println!("{finding}"));
/// assert_eq!(totals.findings, 0);
/// ```
pub fn check(device: Arc<dyn Driver>, report: &mut dyn FnMut(&Finding)) -> Totals {
    check_with(device, &Options::default(), report)
}

/// Runs the whole suite with options.
pub fn check_with(device: Arc<dyn Driver>, options: &Options, report: &mut dyn FnMut(&Finding)) -> Totals {
    let start = settled(&*device);
    let mut suite = Suite::new(device, options, report);
    for class in Class::ALL {
        for case in cases::cases(*class) {
            debug_assert_eq!(case.op.class(), *class);
            suite.names.insert(case.op.form_name());
            forms::check(&mut suite, &case);
            suite.case(&case);
            derivatives::check(&mut suite, &case);
        }
    }
    for name in Op::names() {
        if !suite.names.contains(name) {
            suite.found(name, Problem::NoCase);
        }
    }
    failures::check(&mut suite);
    frees::check(&mut suite);
    suite.settles("the whole suite", start);
    suite.totals
}

/// What a device kind may do otherwise.
pub struct Options {
    /// How many units in the last place a result may be off, by operation and dtype of the result.
    pub ulps: Ulps,
}

/// Units in the last place by operation and dtype.
pub type Ulps = Box<dyn Fn(&Op, DType) -> u64 + Send + Sync>;

/// The interpreter's bits.
impl Default for Options {
    fn default() -> Options {
        Options { ulps: Box::new(|_, _| 0) }
    }
}

/// How much was run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Cases: an operation on operands in one layout, or a scenario.
    pub cases: usize,
    /// Differences found.
    pub findings: usize,
}

/// Something that a device does otherwise.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// The operation with its operands and their layouts, or the scenario.
    pub case: String,
    /// What differs.
    pub problem: Problem,
}

/// What differs.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)]
pub enum Problem {
    /// An element of a result, or of an operand that should not have changed.
    Value {
        of: String,
        element: usize,
        want: String,
        got: String,
    },
    Meta {
        of: String,
        want: Meta,
        got: Meta,
    },
    Failed {
        of: String,
        error: Error,
    },
    /// It should have failed with `want` as the root cause.
    Failure {
        of: String,
        want: Error,
        got: Result<Meta, Error>,
    },
    /// The written form reads back as something else.
    Form {
        form: &'static str,
        text: String,
    },
    /// Values or bytes were left behind.
    Leak {
        before: Memory,
        after: Memory,
    },
    /// No case uses this operation.
    NoCase,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.case)?;
        match &self.problem {
            Problem::Value { of, element, want, got } => {
                write!(f, "element {element} of {of} is {got}, should be {want}")
            }
            Problem::Meta { of, want, got } => write!(f, "{of} is {got}, should be {want}"),
            Problem::Failed { of, error } => write!(f, "{of} failed: {error}"),
            Problem::Failure { of, want, got } => write!(f, "{of} should fail with `{want}`, got {got:?}"),
            Problem::Form { form, text } => write!(f, "its {form} form reads back as something else: {text}"),
            Problem::Leak { before, after } => write!(f, "left behind: {before:?} became {after:?}"),
            Problem::NoCase => f.write_str("no case uses this operation"),
        }
    }
}

struct Suite<'a> {
    device: Arc<dyn Driver>,
    options: &'a Options,
    report: &'a mut dyn FnMut(&Finding),
    totals: Totals,
    /// Written names of the operations that had a case.
    names: BTreeSet<&'static str>,
    /// How many names it has drawn.
    drawn: u64,
}

impl<'a> Suite<'a> {
    fn new(device: Arc<dyn Driver>, options: &'a Options, report: &'a mut dyn FnMut(&Finding)) -> Suite<'a> {
        let (totals, names, drawn) = (Totals::default(), BTreeSet::new(), 0);
        Suite { device, options, report, totals, names, drawn }
    }

    fn found(&mut self, case: &str, problem: Problem) {
        self.totals.findings += 1;
        (self.report)(&Finding { case: case.to_string(), problem });
    }

    /// Checks that the device holds what it held before.
    fn settles(&mut self, case: &str, before: Memory) {
        let after = settled(&*self.device);
        if (after.values, after.live_bytes, after.live_buffers)
            != (before.values, before.live_bytes, before.live_buffers)
        {
            self.found(case, Problem::Leak { before, after });
        }
    }
}

fn settled(device: &dyn Driver) -> Memory {
    let _ = device.sync().wait();
    device.memory()
}
