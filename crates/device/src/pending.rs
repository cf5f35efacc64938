//! An answer that is not there yet: wait for it, wait with a limit, or await it in any async runtime.

use crate::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How a waiter gets a device going.
pub trait Help: Send + Sync {
    /// Runs queued work on the calling thread, until none is left that this thread could run.
    fn run(&self);
    /// Has queued work run on another thread, and returns at once.
    fn start(&self);
}

/// The receiving end of an answer. Dropping it cancels only the answer.
pub struct Pending<T> {
    slot: Arc<Slot<T>>,
    help: Option<Arc<dyn Help>>,
}

/// The giving end of an answer. Dropping it unanswered answers [`Error::Stopped`].
pub struct Promise<T>(Option<Arc<Slot<T>>>);

struct Slot<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

struct State<T> {
    answer: Option<Result<T, Error>>,
    waker: Option<Waker>,
    then: Option<Then<T>>,
}

type Then<T> = Box<dyn FnOnce(Result<T, Error>) + Send>;

/// Both ends of an answer.
pub fn pending<T>(help: Option<Arc<dyn Help>>) -> (Promise<T>, Pending<T>) {
    let slot = Arc::new(Slot {
        state: Mutex::new(State { answer: None, waker: None, then: None }),
        ready: Condvar::new(),
    });
    (Promise(Some(slot.clone())), Pending { slot, help })
}

impl<T> Promise<T> {
    /// Gives the answer.
    pub fn answer(mut self, answer: Result<T, Error>) {
        if let Some(slot) = self.0.take() {
            slot.fill(answer);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.fill(Err(Error::Stopped));
        }
    }
}

impl<T> Slot<T> {
    fn fill(&self, answer: Result<T, Error>) {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(then) = state.then.take() {
            drop(state);
            return then(answer);
        }
        state.answer = Some(answer);
        let waker = state.waker.take();
        drop(state);
        self.ready.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Pending<T> {
    /// An answer that is there already.
    pub fn ready(answer: Result<T, Error>) -> Pending<T> {
        let (promise, pending) = pending(None);
        promise.answer(answer);
        pending
    }

    /// Waits for the answer, running queued work on this thread meanwhile.
    pub fn wait(self) -> Result<T, Error> {
        if let Some(answer) = self.take() {
            return answer;
        }
        if let Some(help) = &self.help {
            help.run();
        }
        let mut state = self.slot.state.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match state.answer.take() {
                Some(answer) => return answer,
                None => state = self.slot.ready.wait(state).unwrap_or_else(|e| e.into_inner()),
            }
        }
    }

    /// Waits at most `limit`; the work goes on in the background.
    pub fn wait_timeout(self, limit: Duration) -> Result<T, Error> {
        let end = Instant::now().checked_add(limit);
        if let Some(help) = &self.help {
            help.start();
        }
        let mut state = self.slot.state.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if let Some(answer) = state.answer.take() {
                return answer;
            }
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::Timeout(limit));
            }
            state = self.slot.ready.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// The answer, if it is there.
    pub fn take(&self) -> Option<Result<T, Error>> {
        self.slot.state.lock().unwrap_or_else(|e| e.into_inner()).answer.take()
    }

    /// Has it computed in the background, for those who will not wait here.
    pub fn start(&self) {
        if let Some(help) = &self.help {
            help.start();
        }
    }

    /// How this answer's device is got going.
    pub(crate) fn helper(&self) -> Option<Arc<dyn Help>> {
        self.help.clone()
    }

    /// Hands the answer to `f` as soon as it is there, on whichever thread gives it.
    pub fn on_answer(self, f: impl FnOnce(Result<T, Error>) + Send + 'static) {
        let mut state = self.slot.state.lock().unwrap_or_else(|e| e.into_inner());
        match state.answer.take() {
            Some(answer) => {
                drop(state);
                f(answer)
            }
            None => state.then = Some(Box::new(f)),
        }
    }

    /// An answer made of this one as soon as that is there, on whichever thread gives it.
    pub fn answered<U: Send + 'static>(
        self,
        f: impl FnOnce(Result<T, Error>) -> Result<U, Error> + Send + 'static,
    ) -> Pending<U>
    where
        T: 'static,
    {
        let (promise, answer) = pending(self.help.clone());
        self.on_answer(move |given| promise.answer(f(given)));
        answer
    }

    /// An answer computed from this one when it is waited for.
    pub fn map<U>(
        self,
        f: impl FnOnce(T) -> Result<U, Error>,
    ) -> Mapped<T, impl FnOnce(T) -> Result<U, Error>> {
        Mapped { pending: self, f: Some(f) }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.slot.state.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(answer) = state.answer.take() {
            return Poll::Ready(answer);
        }
        state.waker = Some(cx.waker().clone());
        drop(state);
        // Computing here would stall the runtime that polls.
        if let Some(help) = &self.help {
            help.start();
        }
        Poll::Pending
    }
}

/// See [`Pending::map`].
pub struct Mapped<T, F> {
    pending: Pending<T>,
    f: Option<F>,
}

impl<T, F> Mapped<T, F> {
    /// Waits for the answer.
    pub fn wait<U>(mut self) -> Result<U, Error>
    where
        F: FnOnce(T) -> Result<U, Error>,
    {
        let f = self.f.take();
        self.pending.wait().and_then(|x| f.map_or(Err(Error::Stopped), |f| f(x)))
    }

    /// Waits at most `limit`.
    pub fn wait_timeout<U>(mut self, limit: Duration) -> Result<U, Error>
    where
        F: FnOnce(T) -> Result<U, Error>,
    {
        let f = self.f.take();
        self.pending.wait_timeout(limit).and_then(|x| f.map_or(Err(Error::Stopped), |f| f(x)))
    }
}

impl<T, U, F: FnOnce(T) -> Result<U, Error> + Unpin> Future for Mapped<T, F> {
    type Output = Result<U, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match Pin::new(&mut self.pending).poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(answer) => {
                let f = self.f.take();
                Poll::Ready(answer.and_then(|x| f.map_or(Err(Error::Stopped), |f| f(x))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_promise_answers() {
        let (promise, pending) = pending::<()>(None);
        drop(promise);
        assert_eq!(pending.wait(), Err(Error::Stopped));
    }

    #[test]
    fn waiting_ends_at_the_limit() {
        let (_promise, pending) = pending::<()>(None);
        let limit = Duration::from_millis(20);
        assert_eq!(pending.wait_timeout(limit), Err(Error::Timeout(limit)));
    }
}
